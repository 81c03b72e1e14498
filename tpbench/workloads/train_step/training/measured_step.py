"""A measured step: its CUDA graph, the times of its phases, its profile and its speed; lines of progress."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.measure import cuda_graph
from tpbench.measure.session import Context
from tpbench.workloads.train_step.estimates import flops_per_token
from tpbench.workloads.train_step.model.inputs import Batch
from tpbench.workloads.train_step.problem import PHASES, TrainStep
from tpbench.workloads.train_step.training.trainer import MarkPhase, Trainer

Mark = tuple[str, Any]
"""A phase, and the CUDA event or, on a CPU, the time in seconds of its begin."""
PEAK_TFLOPS = {
    "H100 PCIe": (756, 378),
    "H100 NVL": (835, 418),
    "H100": (989, 495),
    "H200": (989, 495),
    "H800": (989, 495),
    "H20": (148, 74),
    "GH200": (989, 495),
    "A100": (312, 156),
    "A800": (312, 156),
    "B200": (2250, 1100),
    "B100": (1800, 900),
    "L40S": (362, 183),
    "A10": (125, 62),
}
"""Dense peaks of NVIDIA's datasheets in TFLOP/s, by GPU: (bf16 and fp16, TF32).

TF32 stands for float32, although torch does not use it by default. The first entry that matches a GPU's name applies.
"""


class StepGraph:
    """The captured step of a trainer. Collectives over NCCL are part of the graph."""

    def __init__(
        self, trainer: Trainer, batches: Sequence[Batch], mark: MarkPhase, stream: torch.cuda.Stream | None
    ) -> None:
        """Capture a step; nothing is trained. `stream` is the stream of the warm-up steps. Collective."""
        self.batches = [Batch(batch.tokens.clone(), batch.labels.clone()) for batch in batches]

        def step() -> tuple[Tensor, Tensor]:
            result = trainer.accumulate(self.batches, mark), trainer.update(mark)
            mark("end")
            return result

        self.captured = cuda_graph.capture(step, stream=stream)

    def replay(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Train one step on these micro-batches. Return the loss and the gradient norm, fp32 scalars on the device."""
        for captured, batch in zip(self.batches, batches, strict=True):
            captured.tokens.copy_(batch.tokens)
            captured.labels.copy_(batch.labels)
        self.captured.replay()
        loss, norm = self.captured.result
        return loss.clone(), norm.clone()  # the next replay overwrites both


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


def _between_ms(begin: Any, end: Any) -> float:
    return float(begin.elapsed_time(end)) if isinstance(begin, torch.cuda.Event) else (end - begin) * 1e3


def phase_columns(times_ms: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return `step_forward_ms` and so on, the times of each step on its slowest rank, and `forward_ms` and so on, those
    of the median step.

    One rank gives all phases of a step, and one step those of the row. So they add up to at most the step's time.
    times_ms: this rank's times by step and phase, (steps, phases). Collective.
    """
    own_ms = torch.tensor(times_ms, dtype=torch.float64)
    gathered_ms = [torch.empty_like(own_ms) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered_ms, own_ms)
    ranks_ms = torch.stack(gathered_ms)  # (ranks, steps, phases)
    slowest = ranks_ms.sum(2).argmax(0)
    steps_ms = ranks_ms[slowest, torch.arange(len(slowest))]
    median_step = int(steps_ms.sum(1).argsort()[(len(steps_ms) - 1) // 2])
    by_phase = dict(zip(PHASES, steps_ms.T.tolist(), strict=True))
    medians = {f"{phase}_ms": by_step[median_step] for phase, by_step in by_phase.items()}
    return medians | {f"step_{phase}_ms": by_step for phase, by_step in by_phase.items()}


def throughput(problem: TrainStep, context: Context, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of throughput from the median step's time: device time if there is one, else wall time."""
    seconds = (columns.get("device_ms") or columns["time_ms"]) / 1e3
    samples = problem.batch_size * problem.accumulate * context.dp_size
    tokens_per_s_per_gpu = samples * problem.seq_length / seconds / context.world_size
    result = {
        "tokens_per_s": tokens_per_s_per_gpu * context.world_size,
        "tokens_per_s_per_gpu": tokens_per_s_per_gpu,
        "samples_per_s": samples / seconds,
        "samples_per_s_per_gpu": samples / seconds / context.world_size,
        "tflops_per_gpu": columns["flops"] / seconds / 1e12,
    }
    if context.device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(context.device), problem.dtype)
        if peak is not None:
            result |= {"peak_tflops": peak, "mfu": flops_per_token(problem) * tokens_per_s_per_gpu / 1e12 / peak}
    return result


def peak_tflops(gpu_name: str, dtype: str) -> float | None:
    """Return the datasheet's peak in TFLOP/s, or None for a GPU that is not in the table."""
    words = gpu_name.replace("-", " ").split()
    for name, (half, single) in PEAK_TFLOPS.items():
        if all(word in words for word in name.split()):
            return float(single if dtype == "float32" else half)
    return None


class ProgressLines:
    """Lines on rank 0's stderr, one every `log_interval` steps: step, loss, tokens/s of wall time since the last line.

    They are written between steps, so they cost no measured time.
    """

    def __init__(self, problem: TrainStep, context: Context) -> None:
        self.context, self.interval = context, problem.log_interval if context.rank == 0 else 0
        self.last_step = problem.warmup_steps + problem.steps
        self.tokens_per_step = problem.tokens * problem.accumulate * context.dp_size
        self.reported_steps = 0
        self.reported_at_s = time.perf_counter()

    def report(self, steps_done: int, losses: Sequence[torch.Tensor]) -> None:
        """Write a line if one is due. `losses` are this replica's losses of the steps so far, on the device.

        A step after the measured ones, for a profile, gets no line.
        """
        if not self.interval or steps_done % self.interval or not self.reported_steps < steps_done <= self.last_step:
            return
        self.reported_steps = steps_done
        loss, now_s = float(losses[-1]), time.perf_counter()
        rate = self.interval * self.tokens_per_step / (now_s - self.reported_at_s)
        self.reported_at_s = now_s
        self.context.say(f"step {steps_done}/{self.last_step}: loss {loss:.4f}, {rate:.0f} tokens/s")
