"""All-gather of a few 32-bit numbers between processes of one machine, through a page that all of them map.

A collective of a few bytes on the CPU wakes several threads on each rank. That takes longer than all other host work
of a sparse exchange. This all-gather needs neither sockets nor threads.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from tpbench.comm.collectives import gather_objects, on_one_machine

SHARED_MEMORY = Path("/dev/shm")


class SharedMemoryAllGather:
    """All-gather of signed 32-bit numbers, as many from each rank as there are ranks.

    A number and the epoch (the count of calls) share one 64-bit word, with the epoch in the upper half. A reader that
    sees the right epoch therefore has the right number, in any order in which words become visible.

    Epochs alternate between two halves of the page. A rank that is one epoch ahead writes the other half. No rank can
    be two epochs ahead, because each call waits for all ranks.
    """

    def __init__(self, words: NDArray[np.int64], rank: int) -> None:
        """Use `words`, (2, ranks, numbers) zeros that all ranks map."""
        # Each operation on a memmap would make another memmap, which takes longer than the operation.
        self.words, self.rank, self.epoch = np.asarray(words), rank, 0

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank, by rank. Collective."""
        self.epoch += 1
        epoch = self.epoch & 0x7FFFFFFF
        half = self.words[epoch % 2]
        half[self.rank] = np.array(numbers, dtype=np.int64) & 0xFFFFFFFF | epoch << 32
        while ((seen := half.copy()) >> 32 != epoch).any():
            os.sched_yield()
        gathered: list[list[int]] = seen.astype(np.int32).tolist()
        return gathered


def connect(group: dist.ProcessGroup) -> SharedMemoryAllGather | None:
    """Map one page on all ranks of a group. Return None on every rank if any rank cannot map it. Collective."""
    if not on_one_machine(group):
        return None
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    own_file = allocate_file(16 * ranks * ranks) if rank == 0 else None
    file = gather_objects(str(own_file) if own_file else None, group)[0]
    words: NDArray[np.int64] | None = None
    with suppress(OSError):
        if file is not None:
            words = np.memmap(file, np.int64, "r+", shape=(2, ranks, ranks))
    all_mapped = all(gather_objects(words is not None, group))
    if own_file:
        own_file.unlink()  # so that a rank that dies leaves no file behind
    return SharedMemoryAllGather(words, rank) if all_mapped and words is not None else None


def allocate_file(size: int) -> Path | None:
    """Create a file of `size` allocated bytes, or return None if there is no room.

    A sparse file would not do: the first write to a hole kills the process (SIGBUS) if memory is full.
    """
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix="tpbench-all-gather-", dir=SHARED_MEMORY)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return Path(name)
        except OSError:
            Path(name).unlink()
        finally:
            os.close(descriptor)
    return None
