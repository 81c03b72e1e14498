"""Time forward pass, backward pass and optimizer separately.

This happens in additional steps: it has to wait for the device, which would disturb the time of a whole step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from tpbench.measure.session import Context
from tpbench.workloads.train_step.phases import PHASES, MarkPhase


class PhaseTimer:
    """Sum of the times of each phase in a step: device time by CUDA events on a GPU, else wall time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, float | torch.cuda.Event]] = []
        """Phases in order, each with the time in seconds, or the event, of its begin."""

    def mark(self, phase: str) -> None:
        """Begin a phase and end the one before."""
        if self.device.type != "cuda":
            self.marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((phase, event))

    def finish(self) -> dict[str, float]:
        """End the step and return milliseconds by phase. Waits for the device."""
        self.mark("end")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        times_ms: dict[str, float] = defaultdict(float)
        for (phase, begin), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            times_ms[phase] += _between_ms(begin, end)
        self.marks.clear()
        return times_ms


def _between_ms(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end))
    assert isinstance(begin, float) and isinstance(end, float)
    return (end - begin) * 1e3


def time_phases(
    train: Callable[[MarkPhase], None], restore: Callable[[], None], steps: int, context: Context
) -> dict[str, float]:
    """Return `forward_ms`, `backward_ms` and `optimizer_ms`: of each step the slowest rank, then the median over steps.

    `train` trains one step, `restore` prepares it. Collective.
    """
    timer = PhaseTimer(context.device)
    slowest = []
    for _ in range(steps):
        restore()
        dist.barrier()
        train(timer.mark)
        times_ms = timer.finish()
        slowest_ms = torch.tensor([times_ms[phase] for phase in PHASES], dtype=torch.float64)
        dist.all_reduce(slowest_ms, dist.ReduceOp.MAX)
        slowest.append(slowest_ms.numpy())
    return {f"{phase}_ms": float(ms) for phase, ms in zip(PHASES, np.median(slowest, axis=0), strict=True)}
