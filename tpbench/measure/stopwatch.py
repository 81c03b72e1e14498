"""Times of parts of an iteration, taken as whole iterations are: ranks lined up, caches cold, the slowest rank's."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tpbench.context import Context
from tpbench.measure.clock import Clock, ColdCache, DeviceClock, WallClock

ITERATIONS = {"cuda": 20, "cpu": 5}


class Stopwatch:
    """Device time on GPUs, wall time on CPUs and where it is asked for. Collective."""

    def __init__(self, context: Context) -> None:
        self.device, self.cache = context.device, ColdCache(context.device, context.world_size)
        self.iterations = ITERATIONS[context.device.type]

    def ms(
        self, run: Callable[[], None], restore: Callable[[], None] = lambda: None, *, on_host: bool = False
    ) -> float:
        """The median over a few iterations of the slowest rank's time. `restore` goes before each, untimed."""
        wall = on_host or self.device.type == "cpu"
        clock: Clock = (WallClock if wall else DeviceClock)(self.device, self.cache)
        clock.samples(run, restore, 2)
        taken = torch.tensor(clock.samples(run, restore, self.iterations), dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken.median())
