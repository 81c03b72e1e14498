"""Forward, backward and optimizer timed apart, in steps of their own: the waiting for the device that it takes would
disturb the whole step's time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from tpbench.measure.session import Context
from tpbench.workloads.train_step.document import PHASES
from tpbench.workloads.train_step.trainer import Mark


class Stopwatch:
    """Adds up each phase of a step: device time by events on a GPU, host time elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, float | torch.cuda.Event]] = []

    def mark(self, phase: str) -> None:
        """A phase begins, and with it ends the one before."""
        self.marks.append((phase, self._now()))

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self) -> dict[str, float]:
        """The step is over: milliseconds by phase."""
        self.mark("end")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found: dict[str, float] = defaultdict(float)
        for (phase, begin), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            found[phase] += _between(begin, end)
        self.marks.clear()
        return found


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end))
    assert isinstance(begin, float) and isinstance(end, float)
    return (end - begin) * 1e3


def timed(train: Callable[[Mark], None], restore: Callable[[], None], steps: int, context: Context) -> dict[str, float]:
    """`forward_ms`, `backward_ms`, `optimizer_ms`: medians over steps of the slowest rank. Collective."""
    watch = Stopwatch(context.device)
    slowest = []
    for _ in range(steps):
        restore()
        dist.barrier()
        train(watch.mark)
        found = watch.ms()
        mine = torch.tensor([found[phase] for phase in PHASES], dtype=torch.float64)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        slowest.append(mine.numpy())
    return {f"{phase}_ms": float(ms) for phase, ms in zip(PHASES, np.median(slowest, axis=0), strict=True)}
