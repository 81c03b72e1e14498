"""Two timers: host time from barrier to idle device, and device time by events with launches queued ahead.

The third one is in `chained`. `clocks` is the table of what they measure.
"""

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.measure.machine import L2_FLUSH_BYTES
from tpbench.measure.session import Context

CPU_FLUSH_BYTES = L2_FLUSH_BYTES // 4
"""For all ranks of a CPU together, because they share its last-level cache."""

SLEEP_CYCLES_PER_S = 2.0e9
"""Clock rate assumed for `torch.cuda._sleep`, which counts cycles: an H200 runs at up to 1.98 GHz."""

SLEEP_MARGIN = 1.5
"""The device sleeps so many times as long as the host takes to queue an iteration, also at clocks above 2 GHz."""

ITERATIONS = {"cuda": 20, "cpu": 5}
"""Iterations of a stopwatch. Long steps are timed for about `LIMIT_MS`, but at least `LEAST_ITERATIONS` times."""
WARMUP_ITERATIONS, LEAST_ITERATIONS = 2, 5
CHAINED_MS, LIMIT_MS = 40.0, 300.0

Timed: TypeAlias = tuple[Callable[[], None], Callable[[], None]]
"""A step, and the function that restores its inputs: called before each step, outside the timed region."""

_buffers: weakref.WeakValueDictionary[tuple[torch.device, int], Tensor] = weakref.WeakValueDictionary()


def cold_cache(device: torch.device, ranks_here: int) -> Tensor:
    """Return a buffer that evicts the caches when it is written. All clocks of a process share its memory."""
    size = L2_FLUSH_BYTES if device.type == "cuda" else CPU_FLUSH_BYTES // ranks_here
    buffer = _buffers.get((device, size))
    if buffer is None:
        buffer = _buffers[device, size] = torch.empty(size, dtype=torch.int8, device=device)
    return buffer


def mark(device: torch.device) -> Any:
    """Return the present moment: on a GPU an event on the current stream, on a CPU the host's time."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def ms_between(begin: Any, end: Any) -> float:
    """Return the milliseconds between two marks. The device has reached both."""
    return (end - begin) * 1e3 if isinstance(begin, float) else float(begin.elapsed_time(end))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU is idle. On a CPU nothing is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def do_nothing() -> None:
    """The `restore` of a step that does not change its inputs."""


class Timer(ABC):
    """Times iterations on this rank, each from lined-up ranks and a cold L2 cache on. Collective."""

    def __init__(self, device: torch.device, cache: Tensor) -> None:
        """`cache`: written before each iteration. An empty one leaves the caches as they are."""
        self.device, self.cache = device, cache
        self._one = torch.zeros(1, device=device)

    def samples(self, step: Callable[[], None], restore: Callable[[], None], iterations: int) -> list[float]:
        """Return the milliseconds of each iteration on this rank."""
        return self.interleaved([(step, restore)], iterations)[0]

    def warm_up(self, step: Callable[[], None], restore: Callable[[], None], iterations: int) -> None:
        """Run iterations that do not count."""
        self.samples(step, restore, iterations)

    @abstractmethod
    def interleaved(self, timed: Sequence[Timed], iterations: int) -> list[list[float]]:
        """Return the same for several steps, timed one iteration each in ABBA order."""

    def line_up(self) -> None:
        """Line the ranks up by a barrier: on GPUs a kernel on the current stream."""
        dist.all_reduce(self._one)


class WallTimer(Timer):
    """Host time from the moment when all ranks are lined up with idle devices until this rank's device is idle."""

    def __init__(self, device: torch.device, cache: Tensor) -> None:
        super().__init__(device, cache)
        self.launches_ms: list[float] = []
        """For each iteration that counts: milliseconds from the call of the step until it returned."""

    def warm_up(self, step: Callable[[], None], restore: Callable[[], None], iterations: int) -> None:
        kept = len(self.launches_ms)
        super().warm_up(step, restore, iterations)
        del self.launches_ms[kept:]

    def interleaved(self, timed: Sequence[Timed], iterations: int) -> list[list[float]]:
        samples: list[list[float]] = [[] for _ in timed]
        for index in abba_order(len(timed), iterations):
            step, restore = timed[index]
            restore()
            self.cache.zero_()
            synchronize(self.device)
            self.line_up()
            synchronize(self.device)
            began = time.perf_counter()
            step()
            returned = time.perf_counter()
            synchronize(self.device)
            ended = time.perf_counter()
            samples[index].append((ended - began) * 1e3)
            self.launches_ms.append((returned - began) * 1e3)
        return samples


class DeviceTimer(Timer):
    """Device time by CUDA events, which enclose only the step.

    The host queues each iteration while the device sleeps, so that launches and late hosts do not show.
    """

    def interleaved(self, timed: Sequence[Timed], iterations: int) -> list[list[float]]:
        enqueue_s = []
        for step, restore in timed:
            restore()
            enqueue_s.append(self._enqueue_s(step))
        marks: list[list[tuple[Any, Any]]] = [[] for _ in timed]
        for index in abba_order(len(timed), iterations):
            step, restore = timed[index]
            restore()  # before the sleep, which covers the launches of the step only
            torch.cuda._sleep(int((SLEEP_MARGIN * enqueue_s[index] + 50e-6) * SLEEP_CYCLES_PER_S))
            self.cache.zero_()
            self.line_up()
            begin = mark(self.device)
            step()
            marks[index].append((begin, mark(self.device)))
        synchronize(self.device)
        return [[ms_between(*pair) for pair in pairs] for pairs in marks]

    def _enqueue_s(self, step: Callable[[], None]) -> float:
        synchronize(self.device)
        began = time.perf_counter()
        step()
        queued_s = time.perf_counter() - began
        synchronize(self.device)
        return _slowest([queued_s])[0]


def abba_order(count: int, iterations: int) -> list[int]:
    """Return the indices of `count` steps, each `iterations` times. ABBA order: every second pass is reversed."""
    return [index for number in range(iterations) for index in range(count)[:: -1 if number % 2 else 1]]


class Stopwatch:
    """Times in ms: device time on GPUs, wall time on CPUs or on request. Collective."""

    def __init__(self, context: Context) -> None:
        self.device, self.cache = context.device, cold_cache(context.device, context.world_size)

    def ms(self, step: Callable[[], None], restore: Callable[[], None] = do_nothing, *, on_host: bool = False) -> float:
        """Return the median over a few iterations of the slowest rank's time."""
        return median(self.interleaved_ms((step, restore), on_host=on_host)[0])

    def interleaved_ms(self, *timed: Timed, iterations: int | None = None, on_host: bool = False) -> list[list[float]]:
        """Return the slowest rank's time of each iteration, for several steps in ABBA order, as clocks change."""
        timer = self._timer(on_host)
        last_ms = [timer.samples(step, restore, WARMUP_ITERATIONS)[-1] for step, restore in timed]
        if iterations is None:
            affordable = int(LIMIT_MS / max(*_slowest(last_ms), 1e-3))
            iterations = min(ITERATIONS[self.device.type], max(LEAST_ITERATIONS, affordable))
        return [_slowest(samples) for samples in timer.interleaved(timed, iterations)]

    def chained_ms(self, *timed: Timed, iterations: int | None = None) -> list[list[float]]:
        """Return the wall time of a step back to back with others, with `restore`, in alternating blocks of steps.

        All blocks have as many iterations: `CHAINED_MS` of the first step.
        """
        first_ms = self.ms(*timed[0], on_host=True)
        count = max(2, min(ITERATIONS["cuda"], int(CHAINED_MS / first_ms)))

        def block(step: Callable[[], None], restore: Callable[[], None]) -> None:
            for _ in range(count):
                step()
                restore()

        blocks = [(partial(block, *pair), do_nothing) for pair in timed]
        samples = self.interleaved_ms(*blocks, iterations=iterations, on_host=True)
        return [[block_ms / count for block_ms in of_step] for of_step in samples]

    def blocks_ms(self, *timed: Timed, iterations: int) -> list[list[float]]:
        """Return each step's times in the second half of blocks of its own, when a GPU's clock has followed it."""
        timer = self._timer(False)
        samples: list[list[float]] = [[] for _ in timed]
        for index in abba_order(len(timed), 2):
            samples[index] += timer.samples(*timed[index], iterations)[iterations // 2 :]
        return [_slowest(step_samples) for step_samples in samples]

    def _timer(self, on_host: bool) -> Timer:
        wall = on_host or self.device.type == "cpu"
        return (WallTimer if wall else DeviceTimer)(self.device, self.cache)


def _slowest(samples: Sequence[float]) -> list[float]:
    """Return the time of each iteration on its slowest rank."""
    slowest = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()  # type: ignore[no-any-return]
