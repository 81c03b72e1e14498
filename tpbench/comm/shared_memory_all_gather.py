"""Small numbers from every rank to every rank of one machine: through a page that all map, without sockets or threads.

A collective of a few bytes on the CPU wakes several threads on each rank, which takes longer than all else that the
host does in a sparse exchange.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

SHARED = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Board:
    """Numbers of 32 bits. Each is written in one word with its exchange's number in the upper half, so that whoever
    sees that number has the right one: nothing depends on the order in which words become visible.

    Exchanges take turns on two halves. A rank that is one exchange ahead writes the other half, and none is two ahead,
    as each exchange awaits all ranks.
    """

    def __init__(self, words: NDArray[np.int64], rank: int) -> None:
        """`words`: (2, ranks, numbers) zeros that all ranks map."""
        self.words, self.rank, self.turn = words, rank, 0

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        """Everybody's numbers, by rank."""
        self.turn += 1
        turn = self.turn & 0x7FFFFFFF
        half = self.words[turn % 2]
        half[self.rank] = np.array(mine, dtype=np.int64) & 0xFFFFFFFF | turn << 32
        while ((seen := half.copy()) >> 32 != turn).any():
            os.sched_yield()
        numbers: list[list[int]] = seen.astype(np.int32).tolist()
        return numbers


def board(group: dist.ProcessGroup, rank: int, ranks: int) -> Board | None:
    """One with `ranks` numbers a rank; None where not all can map one file. Collective, the same on every rank."""
    if not on_one_machine(group, ranks):
        return None
    file = everybodys(allotted(16 * ranks * ranks) if rank == 0 else None, group, ranks)[0]
    words: NDArray[np.int64] | None = None
    with suppress(OSError):
        if file is not None:
            words = np.memmap(file, np.int64, "r+", shape=(2, ranks, ranks))
    mapped = all(everybodys(words is not None, group, ranks))
    if rank == 0 and file is not None:
        file.unlink()  # a rank that dies leaves nothing behind
    return Board(words, rank) if mapped and words is not None else None


def allotted(size: int) -> Path | None:
    """A new file of so many bytes that are really there: a hole would kill who writes into it when memory is full."""
    with suppress(OSError):
        number, name = tempfile.mkstemp(prefix="tpbench-board-", dir=SHARED)
        try:
            os.posix_fallocate(number, 0, size)
            return Path(name)
        except OSError:
            Path(name).unlink()
        finally:
            os.close(number)
    return None


def on_one_machine(group: dist.ProcessGroup, ranks: int) -> bool:
    """Whether all ranks run under one kernel. Collective."""
    boot = BOOT_ID.read_text() if BOOT_ID.exists() else ""
    return len(set(everybodys((socket.gethostname(), boot), group, ranks))) == 1


def everybodys(value: Any, group: dist.ProcessGroup, ranks: int) -> list[Any]:
    """One value of each rank, by rank. Collective."""
    answers: list[Any] = [None] * ranks
    dist.all_gather_object(answers, value, group=group)
    return answers
