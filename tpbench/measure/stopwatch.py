"""Times of parts of an iteration, taken as whole iterations are: ranks lined up, caches cold, the slowest rank's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeAlias

import torch
import torch.distributed as dist

from tpbench.measure.clock import Clock, ColdCache, DeviceClock, Timed, WallClock
from tpbench.measure.session import Context

ITERATIONS = {"cuda": 20, "cpu": 5}
WARMUP = 2

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
        clock.samples(run, restore, WARMUP)
        return median(_slowest(clock.samples(run, restore, self.iterations)))

    def in_turns(self, *timed: Timed, iterations: int | None = None) -> list[list[float]]:
        """The slowest rank's times of several, one iteration of each after the other (A B, B A, ...): a GPU at its
        power limit lowers its clock as it goes on, so that only times from the same moment can be compared."""
        clock = self._clock(on_host=False)
        for run, restore in timed:
            clock.samples(run, restore, WARMUP)
        return [_slowest(samples) for samples in clock.in_turns(timed, iterations or self.iterations)]

    def _clock(self, on_host: bool) -> Clock:
        wall = on_host or self.device.type == "cpu"
        return (WallClock if wall else DeviceClock)(self.device, self.cache)


def difference(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over turns of how much longer one took than the other."""
    return median(one - other for one, other in zip(above, below, strict=True))


def _slowest(samples: Sequence[float]) -> list[float]:
    """Each iteration's time on the slowest rank."""
    taken = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return [float(each) for each in taken]
