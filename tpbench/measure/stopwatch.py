"""Times of parts of an iteration, taken as those of whole iterations: ranks lined up, cold caches, slowest rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from tpbench.measure.clock import Clock, ColdCache, DeviceClock, Timed, WallClock, abba_order
from tpbench.measure.session import Context

ITERATIONS = {"cuda": 20, "cpu": 5}
WARMUP_ITERATIONS = 2
LEAST_ITERATIONS = 5
LIMIT_MS = 300.0
"""Long steps are timed for about so long, but at least `LEAST_ITERATIONS` times."""


def do_nothing() -> None:
    """The `restore` of a step that does not change its inputs."""


class Stopwatch:
    """Times in ms: device time on GPUs, wall time on CPUs or on request. Collective."""

    def __init__(self, context: Context) -> None:
        self.device, self.cache = context.device, ColdCache(context.device, context.world_size)
        self.iterations = ITERATIONS[context.device.type]

    def ms(self, step: Callable[[], None], restore: Callable[[], None] = do_nothing, *, on_host: bool = False) -> float:
        """Return the median over a few iterations of the slowest rank's time.

        `restore` is called before each iteration, outside the timed region.
        """
        return median(self.samples_ms(step, restore, on_host=on_host))

    def samples_ms(
        self, step: Callable[[], None], restore: Callable[[], None] = do_nothing, *, on_host: bool = False
    ) -> list[float]:
        """Return the slowest rank's time of each iteration."""
        return self.interleaved_ms((step, restore), on_host=on_host)[0]

    def interleaved_ms(
        self, *timed: Timed, iterations: int | None = None, most: int | None = None, on_host: bool = False
    ) -> list[list[float]]:
        """Return the slowest rank's time of each iteration, for several steps timed in ABBA order.

        A GPU at its power limit lowers its clock over time, so that only times of the same moment are comparable.
        `iterations`: the number of iterations of each step. Without it, `most` is the largest number, and long steps
        have fewer (`LIMIT_MS`).
        """
        clock = self._clock(on_host)
        last_ms = [clock.samples(step, restore, WARMUP_ITERATIONS)[-1] for step, restore in timed]
        if iterations is None:
            iterations = _affordable(max(_slowest(last_ms)), most or self.iterations)
        return [_slowest(samples) for samples in clock.interleaved(timed, iterations)]

    def blocks_ms(self, *timed: Timed, iterations: int) -> list[list[float]]:
        """Return the same for each step in blocks of consecutive iterations of its own, in ABBA order of blocks.

        A GPU at its power limit needs some iterations until its clock is that of a step. So the first half of each
        block does not count.
        """
        clock = self._clock(False)
        samples: list[list[float]] = [[] for _ in timed]
        for index in abba_order(len(timed), 2):
            samples[index] += clock.samples(*timed[index], iterations)[iterations // 2 :]
        return [_slowest(step_samples) for step_samples in samples]

    def _clock(self, on_host: bool) -> Clock:
        wall = on_host or self.device.type == "cpu"
        return (WallClock if wall else DeviceClock)(self.device, self.cache)


def paired_difference(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median difference of interleaved samples: each sample minus the other step's of the same pass."""
    return median(one - other for one, other in zip(above, below, strict=True))


def _affordable(step_ms: float, most: int) -> int:
    """The iterations of a step that take about `LIMIT_MS`, within limits."""
    return min(most, max(LEAST_ITERATIONS, int(LIMIT_MS / max(step_ms, 1e-3))))


def _slowest(samples: Sequence[float]) -> list[float]:
    """The time of each iteration on its slowest rank."""
    slowest = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(sample) for sample in slowest]
