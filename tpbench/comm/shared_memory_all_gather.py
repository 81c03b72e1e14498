"""All-gather of a few 32-bit numbers between processes of one machine, through a page that all of them map.

A collective of a few bytes on the CPU wakes several threads on each rank, which takes longer than all other host work
of a sparse exchange. This one needs neither sockets nor threads.
"""

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from tpbench.comm.collectives import gather_objects, on_one_machine

SHARED_MEMORY = "/dev/shm"


class SharedMemoryAllGather:
    """All-gather of signed 32-bit numbers, as many from each rank as there are ranks.

    A number and the epoch (the count of calls) share one 64-bit word, with the epoch in the upper half. A reader that
    sees the right epoch therefore has the right number, in any order in which words become visible.

    Epochs alternate between two halves of the page, because a rank can be one epoch ahead, but not two: each call waits
    for all ranks.
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
    name: str | None = None
    words: NDArray[np.int64] | None = None
    with ExitStack() as until_mapped:  # then the file goes, so that a rank that dies later leaves none behind
        with suppress(OSError):
            if rank == 0:
                file = until_mapped.enter_context(tempfile.NamedTemporaryFile(prefix="tpbench-", dir=SHARED_MEMORY))
                # In a sparse file the first write to a hole kills the process (SIGBUS) if memory is full.
                os.posix_fallocate(file.fileno(), 0, 16 * ranks * ranks)
                name = file.name
        file_of_all = gather_objects(name, group)[0]
        with suppress(OSError):
            if file_of_all is not None:
                words = np.memmap(file_of_all, np.int64, "r+", shape=(2, ranks, ranks))
        all_mapped = all(gather_objects(words is not None, group))
    return SharedMemoryAllGather(words, rank) if all_mapped and words is not None else None
