"""Times of parts of an iteration, taken as whole iterations are: ranks lined up, caches cold, the slowest rank's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from tpbench.context import Context
from tpbench.measure.clock import Clock, ColdCache, DeviceClock, WallClock

ITERATIONS = {"cuda": 20, "cpu": 5}
TURNS = 4

Run: TypeAlias = Callable[[], None]


def nothing() -> None:
    """Restores nothing."""


class Stopwatch:
    """Device time on GPUs, wall time on CPUs and where it is asked for. Collective."""

    def __init__(self, context: Context) -> None:
        self.device, self.cache = context.device, ColdCache(context.device, context.world_size)
        self.iterations = ITERATIONS[context.device.type]

    def ms(self, run: Run, restore: Run = nothing, *, on_host: bool = False) -> float:
        """The median over a few iterations of the slowest rank's time. `restore` goes before each, untimed."""
        clock = self._clock(on_host)
        clock.samples(run, restore, 2)
        return _median(clock.samples(run, restore, self.iterations))

    def in_turns(self, *timed: tuple[Run, Run]) -> list[float]:
        """The same of several, each with its `restore`, in turns (A B, B A, ...): clocks that fall under load hit all
        alike, so that their differences are their own."""
        clock = self._clock(on_host=False)
        taken: list[list[float]] = [[] for _ in timed]
        for run, restore in timed:
            clock.samples(run, restore, 2)
        each = -(-self.iterations // TURNS)
        for turn in range(TURNS):
            for at in range(len(timed))[:: -1 if turn % 2 else 1]:
                taken[at] += clock.samples(*timed[at], each)
        return [_median(samples) for samples in taken]

    def _clock(self, on_host: bool) -> Clock:
        wall = on_host or self.device.type == "cpu"
        return (WallClock if wall else DeviceClock)(self.device, self.cache)


def _median(samples: Sequence[float]) -> float:
    """Over iterations of the slowest rank's."""
    taken = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken.median())
