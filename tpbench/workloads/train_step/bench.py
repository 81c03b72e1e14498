"""Run the train step on a rank: train and time a variant's steps, and report speed and correctness."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.collectives import gather_objects, nccl_algorithm
from tpbench.kernels.distributed import forbid_multicast
from tpbench.measure import cuda_graph, rank_memory
from tpbench.measure.ranks import gather_number
from tpbench.measure.rates import compute_ms, gemm_tflops
from tpbench.measure.session import STEPS_FILE, Context, Costs, IterationSchedule, Session, Verdict
from tpbench.measure.timers import Stopwatch, ms_between
from tpbench.workloads.sizes import ITEM_BYTES
from tpbench.workloads.step import require
from tpbench.workloads.train_step import estimates
from tpbench.workloads.train_step.model.inputs import Batch, replica_batches
from tpbench.workloads.train_step.oracle import compute_reference, differing_replicas, gradient_norms
from tpbench.workloads.train_step.problem import PHASES, TrainStep
from tpbench.workloads.train_step.training.trainer import Trainer, ignore_phase
from tpbench.workloads.train_step.workload import WORKLOAD

PEAK_TFLOPS = {
    "H100 PCIe": (756, 378), "H100 NVL": (835, 418), **dict.fromkeys(("H100", "H200", "H800", "GH200"), (989, 495)),
    "H20": (148, 74), **dict.fromkeys(("A100", "A800"), (312, 156)), "B200": (2250, 1100), "B100": (1800, 900),
    "L40S": (362, 183), "A10": (125, 62),
}  # fmt: skip
"""Dense peaks of NVIDIA's datasheets in TFLOP/s, by GPU: (bf16 and fp16, TF32).

TF32 stands for float32, although torch does not use it by default. The first entry that matches a GPU's name applies.
"""


@WORKLOAD.session
class TrainStepSession(Session):
    """Training with one variant on this rank.

    Each step's batches are made before the step, outside the timed region. They are new ones, unless `problem.batches`
    says how many the steps repeat. Losses stay on the device until the end.

    The losses of all steps of a variant from outside this package are compared with the reference. Each is copied as
    its step ends, so that nothing can write it later.
    """

    schedule: IterationSchedule

    def __init__(self, problem: TrainStep, variant: estimates.TrainVariant, context: Context) -> None:
        if context.device.type == "cuda":
            forbid_multicast()  # before NCCL makes its communicators, which it does later
        self.problem, self.variant, self.context = problem, variant, context
        self.from_outside = variant.place is not None
        self.gemm_tflops = gemm_tflops(getattr(torch, problem.dtype), context.device, Stopwatch(context))
        self.reference = compute_reference(problem, context, whole_run=self.from_outside)
        self.schedule = IterationSchedule(
            problem.warmup_steps, problem.steps, held_before=rank_memory.held_bytes(context.device)
        )
        context.say(f"making the model for {variant.name}")
        began = time.perf_counter()
        cuda = context.device.type == "cuda"
        # A graph is captured on a stream of its own, where everything that refers to streams must have been made.
        self.stream = torch.cuda.Stream(context.device) if context.graph and cuda else None
        with on_stream(self.stream):
            self.trainer: Trainer = require(variant.prepare(problem, context), Trainer, variant, "the function")
        if cuda:
            torch.cuda.synchronize(context.device)
        self.init_s = time.perf_counter() - began
        self.batches: list[Batch] = []
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.gradient_norms: dict[str, float] = {}
        """Those of the first step, by parameter."""
        self.phases = PhaseTimer(context.device)
        self.times_phases = True
        self.graph: cuda_graph.CapturedWork[tuple[Tensor, Tensor]] | None = None
        self.captured_batches: list[Batch] = []
        self.graph_gib = 0.0
        self.reported_steps, self.reported_at_s = 0, time.perf_counter()
        self.costs = costs(problem, variant, context, self.gemm_tflops)

    def step(self) -> None:
        """Train one step, or replay the graph if there is one."""
        if self.graph is not None:
            for captured, batch in zip(self.captured_batches, self.batches, strict=True):
                captured.tokens.copy_(batch.tokens)
                captured.labels.copy_(batch.labels)
            self.graph.replay()
            loss, norm = (number.clone() for number in self.graph.result)  # the next replay overwrites both
        else:
            with on_stream(self.stream):
                # Steps of the warm-up have no time of their own.
                is_first = not self.losses and self.problem.warmup_steps > 0
                loss, norm = self.train(self.batches, self._keep_gradient_norms if is_first else None)
        if self.from_outside:
            for number in (loss, norm):
                require(number, Tensor, self.variant, "accumulate or update")
            loss, norm = loss.detach().clone(), norm.detach().clone()
        self.losses.append(loss)
        self.norms.append(norm)
        self.phases.unread = self.times_phases

    def train(self, batches: Sequence[Batch], before_update: Callable[[], None] | None = None) -> tuple[Tensor, Tensor]:
        """Train one step, and time its phases. Return the loss and the gradient norm."""
        self.phases.marks = []
        mark = self.phases.mark if self.times_phases else ignore_phase
        loss = self.trainer.accumulate(batches, mark)
        if before_update is not None:
            before_update()
        norm = self.trainer.update(mark)
        mark("end")
        return loss, norm

    def _keep_gradient_norms(self) -> None:
        if self.reference.of_parameters:
            self.gradient_norms = gradient_norms(self.trainer, self.reference.of_parameters, self.context)

    def capture(self) -> float:
        """Make all later steps replays of a CUDA graph, with its collectives over NCCL, and return the GiB that the
        graph keeps. Nothing is trained. Collective."""
        self.context.say("capturing a graph")
        self.restore()
        with rank_memory.extra_peak(self.context.device) as peak:
            self.captured_batches = [Batch(batch.tokens.clone(), batch.labels.clone()) for batch in self.batches]
            self.graph = cuda_graph.capture(lambda: self.train(self.captured_batches), stream=self.stream)
        self.graph_gib = peak.peak_gib[0]
        return self.graph_gib

    def restore(self) -> None:
        """Make the next step's batches, and write a progress line if one is due."""
        step, context = len(self.losses), self.context
        self.phases.read()
        self._report()
        self.batches = replica_batches(self.problem, step, context.dp_rank, context.dp_size, context.device)

    def check(self) -> Verdict:
        """Compare the first steps, and the timed ones of a variant from outside, with the reference, the first step's
        gradients as well, and the weights of the replicas with each other. Collective."""
        problem, reference = self.problem, self.reference
        self._report()
        of_replicas = torch.stack(self.losses).double().cpu()
        dist.all_reduce(of_replicas, group=self.context.dp_group)
        losses: list[float] = (of_replicas / self.context.dp_size).tolist()
        norms: list[float] = torch.stack(self.norms).double().cpu().tolist()
        differing = differing_replicas(self.trainer, problem, self.context)
        wrong = reference.complaint(losses, norms, problem.dtype) or differing
        wrong = wrong or reference.gradient_complaint(self.gradient_norms, norms[0], problem.dtype)
        held_gib = (rank_memory.held_bytes(self.context.device) - self.schedule.held_before) / 2**30
        columns = {
            "loss_value": losses[-1],
            **reference.errors(losses, norms),
            "grad_norm": norms[-1],
            "losses": losses,
            "grad_norms": norms,
            "oracle": reference.source,
            "gemm_tflops": self.gemm_tflops,
            "init_s": max(gather_number(self.init_s, self.context)),
            "steady_gib": max(gather_number(held_gib + self.graph_gib, self.context)),
        }
        reasons = enumerate(gather_objects(wrong))
        return Verdict(columns, next((f"rank {rank}: {reason}" for rank, reason in reasons if reason), None))

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return throughput, times of phases, and what NCCL runs in the larger dimension of the mesh. Collective."""
        result = throughput(self.problem, self.context, columns)
        if self.context.device.type == "cuda" and self.context.world_size > 1:
            group = max(self.context.dp_group, self.context.tp_group, key=dist.get_world_size)
            shape = self.problem.tokens, self.problem.hidden_size
            result["nccl_algorithm"] = nccl_algorithm(shape, torch.float32, group)
        self.phases.read()
        self.times_phases = False  # reading the times of further steps would wait for each of them
        return result | phase_columns(self.phases.times_ms[-self.problem.steps :])

    def _report(self) -> None:
        """Write a line of progress on rank 0, if one is due. Steps after the measured ones, for a profile, get none."""
        problem, done, now_s = self.problem, len(self.losses), time.perf_counter()
        last, interval = problem.warmup_steps + problem.steps, 0 if self.context.rank else problem.log_interval
        if not interval or done % interval or not self.reported_steps < done <= last:
            return
        step_s = (now_s - self.reported_at_s) / interval
        rate = problem.tokens * problem.accumulate * self.context.dp_size / step_s
        line = f"step {done}/{last}: loss {float(self.losses[-1]):.4f}, {step_s * 1e3:.1f} ms, {rate:.0f} tokens/s"
        self.context.say(line)
        # A full disk must not cost the measurement too.
        with contextlib.suppress(OSError), (self.context.folder / STEPS_FILE).open("a") as file:
            file.write(f"{line}\n")
        self.reported_steps, self.reported_at_s = done, now_s


def costs(problem: TrainStep, variant: estimates.TrainVariant, context: Context, tflops: float) -> Costs:
    """Return the unavoidable costs of a step on one rank. The floor is the longer of compute and memory.

    Compute: this rank's operations of matrix products at `tflops`, the measured rate of a large product in TFLOP/s.
    Memory: each parameter and both of its moments, read once and written once, spread evenly over the ranks.
    """
    states = 3 * estimates.parameters(problem) * ITEM_BYTES[problem.stored_dtype] // context.world_size
    sent = estimates.bytes_communicated(problem, variant.distribution, context.tp_size, context.dp_size)
    flops = estimates.step_flops(problem) // context.tp_size
    return Costs(bytes_moved=2 * states, bytes_communicated=sent, flops=flops, compute_ms=compute_ms(flops, tflops))


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
        self.marks: list[tuple[str, Any]] = []
        """The phases of the last step, or of the step that a graph replays, each with the CUDA event or, on a CPU, the
        time in seconds of its begin."""
        self.unread = False
        """True if the times of the last step have not been read."""
        self.times_ms: list[list[float]] = []
        """The milliseconds of each of `PHASES`, by step."""

    def mark(self, phase: str) -> None:
        """Begin a phase and end the one before. A phase may have several parts, one for each micro-batch."""
        begin: Any = time.perf_counter()
        if self.device.type == "cuda":
            # A graph records its external events again at each replay.
            external = {"external": True} if torch.cuda.is_current_stream_capturing() else {}
            begin = torch.cuda.Event(enable_timing=True, **external)
            begin.record()
        self.marks.append((phase, begin))

    def read(self) -> None:
        """Read the times of the last step, before another replay records its events again. The device must be idle."""
        if self.unread:
            times_ms = dict.fromkeys(PHASES, 0.0)
            for (phase, begin), (_, end) in itertools.pairwise(self.marks):
                times_ms[phase] += ms_between(begin, end)
            self.times_ms.append(list(times_ms.values()))
        self.unread = False


def phase_columns(times_ms: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return `step_forward_ms` and so on, the times of each step on its slowest rank, and `forward_ms` and so on, those
    of the median step.

    One rank gives all phases of a step, and one step those of the row. So they add up to at most the step's time.
    times_ms: this rank's times by step and phase, (steps, phases). Collective.
    """
    ranks_ms = torch.tensor(gather_objects(times_ms), dtype=torch.float64)  # (ranks, steps, phases)
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
    gpu_name = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else ""
    if peak := peak_tflops(gpu_name, problem.dtype):
        result |= {"peak_tflops": peak, "mfu": estimates.flops_per_token(problem) * tokens_per_s_per_gpu / 1e12 / peak}
    return result


def peak_tflops(gpu_name: str, dtype: str) -> float | None:
    """Return the datasheet's peak in TFLOP/s, or None for a GPU that is not in the table."""
    words = {*gpu_name.replace("-", " ").split()}
    peaks = next((peaks for name, peaks in PEAK_TFLOPS.items() if words.issuperset(name.split())), None)
    return peaks and float(peaks[dtype == "float32"])
