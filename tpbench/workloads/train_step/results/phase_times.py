"""Time forward pass, backward pass and optimizer within the measured steps, without waiting for the device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tpbench.workloads.train_step.training.phases import PHASES

Mark = tuple[str, "float | torch.cuda.Event"]
"""A phase, and the time in seconds, or the event, of its begin."""


class PhaseTimer:
    """The times of each phase of each step on this rank: device time by CUDA events on a GPU, else wall time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Mark] = []
        self._ended: list[Sequence[Mark]] = []
        """Marks of the steps whose times are not read yet."""
        self._times_ms: list[list[float]] = []

    def mark(self, phase: str) -> None:
        """Begin a phase and end the one before. A phase may have several parts, one for each micro-batch."""
        if self.device.type == "cuda":
            # A graph records its external events again at each replay.
            external = {"external": True} if torch.cuda.is_current_stream_capturing() else {}
            event = torch.cuda.Event(enable_timing=True, **external)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def end_step(self) -> None:
        """End the last phase and the step."""
        self.mark("end")
        self._ended.append(self.taken_marks())

    def taken_marks(self) -> Sequence[Mark]:
        """Remove and return the marks since the last step. Marks of a captured step belong to its graph."""
        marks, self._marks = self._marks, []
        return marks

    def end_replay(self, marks: Sequence[Mark]) -> None:
        """End a step that was the replay of a graph with these marks."""
        self._ended.append(marks)

    def read(self) -> None:
        """Read the times of the last steps, before another replay records its events again. The device must be idle."""
        self._times_ms += [[_sum_ms(marks, phase) for phase in PHASES] for marks in self._ended]
        self._ended.clear()

    def times_ms(self, steps: int) -> list[list[float]]:
        """Return the milliseconds of each of `PHASES` in each of the last steps, (steps, phases). The device must be
        idle."""
        self.read()
        return self._times_ms[-steps:]


def _sum_ms(marks: Sequence[Mark], phase: str) -> float:
    pairs = itertools.pairwise(marks)
    return sum(_between_ms(begin, end) for (name, begin), (_, end) in pairs if name == phase)


def _between_ms(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end))
    assert isinstance(begin, float) and isinstance(end, float)
    return (end - begin) * 1e3


def phase_columns(times_ms: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return `step_forward_ms` and so on, the slowest rank's time in each step, and their medians, `forward_ms`.

    times_ms: this rank's times by step and phase, (steps, phases). Collective.
    """
    slowest_ms = torch.tensor(times_ms, dtype=torch.float64)
    dist.all_reduce(slowest_ms, dist.ReduceOp.MAX)
    by_phase = dict(zip(PHASES, slowest_ms.T.tolist(), strict=True))
    medians = {f"{phase}_ms": float(np.median(each)) for phase, each in by_phase.items()}
    return medians | {f"step_{phase}_ms": each for phase, each in by_phase.items()}
