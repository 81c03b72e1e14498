"""The two clocks: wall time from barrier to barrier, and device time with launches queued ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

L2_FLUSH_BYTES = 256 * 2**20
"""Twice and more the L2 of any GPU so far. On a CPU the ranks share the last-level cache, and so this."""

SLEEP_CYCLES_PER_S = 2.0e9
"""No GPU clock is above this, so that a sleep of so many cycles is at least as long as meant."""


Timed: TypeAlias = tuple[Callable[[], None], Callable[[], None]]
"""A step, and what restores its inputs: goes before each step, outside what is timed."""


class Clock(Protocol):
    """Times iterations on this rank, each started with all ranks lined up and L2 cold."""

    def samples(self, step: Callable[[], None], restore: Callable[[], None], iterations: int) -> list[float]:
        """Milliseconds of each iteration on this rank."""

    def in_turns(self, timed: Sequence[Timed], iterations: int) -> list[list[float]]:
        """The same of several, one iteration of each after the other: A B, B A, ..."""


class ColdCache:
    """Evicts the caches by writing through them."""

    def __init__(self, device: torch.device, ranks_here: int) -> None:
        share = L2_FLUSH_BYTES if device.type == "cuda" else L2_FLUSH_BYTES // (4 * ranks_here)
        self.buffer = torch.empty(share, dtype=torch.int8, device=device)

    def flush(self) -> None:
        self.buffer.zero_()


class WallClock:
    """Host time from all ranks lined up, with the device idle, until this rank's device is idle again."""

    def __init__(self, device: torch.device, cache: ColdCache) -> None:
        self.device, self.cache = device, cache
        self.line = torch.zeros(1, device=device)

    def samples(self, step: Callable[[], None], restore: Callable[[], None], iterations: int) -> list[float]:
        return self.in_turns([(step, restore)], iterations)[0]

    def in_turns(self, timed: Sequence[Timed], iterations: int) -> list[list[float]]:
        taken: list[list[float]] = [[] for _ in timed]
        for at in turns(len(timed), iterations):
            step, restore = timed[at]
            restore()
            self.cache.flush()
            self._synchronize()
            dist.all_reduce(self.line)
            self._synchronize()
            began = time.perf_counter()
            step()
            self._synchronize()
            taken[at].append((time.perf_counter() - began) * 1e3)
        return taken

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class DeviceClock:
    """Device time by events, on CUDA.

    Each iteration is queued whole while the device sleeps: then L2 is flushed, a collective lines the ranks up on the
    device (a host that lags would otherwise pass for communication), and the events enclose the step alone.
    """

    def __init__(self, device: torch.device, cache: ColdCache) -> None:
        self.device, self.cache = device, cache
        self.line = torch.zeros(1, device=device)

    def samples(self, step: Callable[[], None], restore: Callable[[], None], iterations: int) -> list[float]:
        return self.in_turns([(step, restore)], iterations)[0]

    def in_turns(self, timed: Sequence[Timed], iterations: int) -> list[list[float]]:
        enqueue_s = []
        for step, restore in timed:
            restore()
            enqueue_s.append(self._enqueue_s(step))
        pairs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in timed]
        for at in turns(len(timed), iterations):
            step, restore = timed[at]
            restore()  # before the sleep, which is as long as the launches of the step alone take
            torch.cuda._sleep(int((1.5 * enqueue_s[at] + 50e-6) * SLEEP_CYCLES_PER_S))
            self.cache.flush()
            dist.all_reduce(self.line)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            pairs[at].append((begin, end))
        torch.cuda.synchronize(self.device)
        return [[begin.elapsed_time(end) for begin, end in each] for each in pairs]

    def _enqueue_s(self, step: Callable[[], None]) -> float:
        """Host seconds to queue one iteration, the longest over ranks, which the sleep must cover."""
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        step()
        longest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        torch.cuda.synchronize(self.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)


def turns(number: int, iterations: int) -> list[int]:
    """Whose turn it is: of so many each `iterations` times, in an order that turns around each time."""
    there = list(range(number))
    return [at for turn in range(iterations) for at in there[:: -1 if turn % 2 else 1]]
