"""The parts of a measured step: its CUDA graph, the times of its phases, and its profile."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tpbench.measure.gpu_profiler import COMMUNICATION, Interval, covered_ms, events, gpu_profile, intervals, keep_trace
from tpbench.measure.session import Context
from tpbench.workloads.train_step.model.inputs import Batch
from tpbench.workloads.train_step.problem import PHASES
from tpbench.workloads.train_step.training.trainer import MarkPhase, Trainer

LossAndNorm = tuple[Tensor, Tensor]
Mark = tuple[str, "float | torch.cuda.Event"]
"""A phase, and the time in seconds, or the event, of its begin."""


class StepGraph:
    """The captured step of a trainer. Collectives over NCCL are part of the graph."""

    def __init__(
        self, trainer: Trainer, batches: Sequence[Batch], mark: MarkPhase, stream: torch.cuda.Stream | None
    ) -> None:
        """Capture a step; nothing is trained. `stream` is the stream of the warm-up steps. Collective."""
        self.batches = [Batch(batch.tokens.clone(), batch.labels.clone()) for batch in batches]

        def step() -> LossAndNorm:
            result = trainer.accumulate(self.batches, mark), trainer.update(mark)
            mark("end")
            return result

        (self.loss, self.norm), self.run = capture(step, stream)

    def replay(self, batches: Sequence[Batch]) -> LossAndNorm:
        """Train one step on these micro-batches. Return the loss and the gradient norm, fp32 scalars on the device."""
        for captured, batch in zip(self.batches, batches, strict=True):
            captured.tokens.copy_(batch.tokens)
            captured.labels.copy_(batch.labels)
        self.run()
        return self.loss.clone(), self.norm.clone()  # the next replay overwrites both


def capture(
    step: Callable[[], LossAndNorm], stream: torch.cuda.Stream | None
) -> tuple[LossAndNorm, Callable[[], None]]:
    """Capture `step` on `stream`. Return the tensors that each replay fills, and the replay."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog queries events in a thread of its own, which a global capture would forbid.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = step()
    return result, graph.replay


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run device work on `stream`, after all work of the current stream and before its later work. None: do nothing."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


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


def profile_step(train: Callable[[], None], restore: Callable[[], None], context: Context) -> dict[str, Any]:
    """Profile one step and keep each rank's trace beside the job's logs. On a GPU, return `exposed_share`, the largest
    of any rank.

    `train` trains the step, `restore` prepares it. Collective.
    """
    restore()
    dist.barrier()
    cuda = context.device.type == "cuda"
    with gpu_profile(ProfilerActivity.CPU) if cuda else profile(activities=[ProfilerActivity.CPU]) as profiler:
        train()
        if cuda:
            torch.cuda.synchronize(context.device)
    keep_trace(profiler, context)
    if not cuda:
        return {}
    share = torch.tensor(exposed_share(intervals(events(profiler, on_gpu=True), on_gpu=True)), dtype=torch.float64)
    dist.all_reduce(share, dist.ReduceOp.MAX)
    return {"exposed_share": float(share)}


def exposed_share(timeline: Sequence[Interval]) -> float:
    """Return the share of the timeline, from its first begin to its last end, in which only communication runs."""
    if not timeline:
        return 0.0
    whole = max(each.start_ms + each.length_ms for each in timeline) - min(each.start_ms for each in timeline)
    return (covered_ms(timeline) - covered_ms(each for each in timeline if each.kind != COMMUNICATION)) / whole
