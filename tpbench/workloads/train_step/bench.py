"""Run the train step on a rank: compute the reference, prepare a variant, train, and report speed and correctness."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.collectives import gather_objects
from tpbench.measure import rank_memory
from tpbench.measure.clock import Stopwatch
from tpbench.measure.gpu_trace import keep_trace, profiled
from tpbench.measure.ranks import gather_number
from tpbench.measure.rates import compute_ms, gemm_tflops
from tpbench.measure.session import Context, Costs, IterationSchedule, Verdict
from tpbench.workloads import Variant
from tpbench.workloads.step import require
from tpbench.workloads.train_step.estimates import bytes_communicated, parameters, step_flops
from tpbench.workloads.train_step.model.inputs import Batch, replica_batches
from tpbench.workloads.train_step.oracle import compute_reference
from tpbench.workloads.train_step.problem import ITEM_BYTES, TrainStep
from tpbench.workloads.train_step.training.measured_step import (
    Mark,
    PhaseTimer,
    ProgressLines,
    StepGraph,
    on_stream,
    phase_columns,
    throughput,
)
from tpbench.workloads.train_step.training.trainer import MarkPhase, TorchTrainer, Trainer, gradient_norms, ignore_phase


class TrainStepSession:
    """Training with one variant on this rank.

    Each step's batches are made before the step, outside the timed region. They are new ones, unless `problem.batches`
    says how many the steps repeat. Losses stay on the device until the end.

    The losses of all steps of a variant from outside this package are compared with the reference. Each is copied as
    its step ends, so that nothing can write it later.
    """

    def __init__(self, problem: TrainStep, variant: Variant, context: Context) -> None:
        self.problem, self.variant, self.context = problem, variant, context
        self.from_outside = variant.place is not None
        self.gemm_tflops = gemm_tflops(getattr(torch, problem.dtype), context.device, Stopwatch(context))
        self.reference = compute_reference(problem, context, whole_run=self.from_outside)
        self.schedule = IterationSchedule(
            problem.warmup_steps, problem.steps, held_before=rank_memory.held_bytes(context.device)
        )
        context.say(f"making the model for {variant.name}")
        began = time.perf_counter()
        # A graph is captured on a stream of its own, where everything that refers to streams must have been made.
        cuda = context.device.type == "cuda"
        self.stream = torch.cuda.Stream(context.device) if context.graph and cuda else None
        with on_stream(self.stream):
            self.trainer: Trainer = require(variant.prepare(problem, context), Trainer, variant, "the function")
        if cuda:
            torch.cuda.synchronize(context.device)
        self.init_s = time.perf_counter() - began
        self.batches: list[Batch] = []
        self.gradients: dict[str, float] = {}
        """The norm of each gradient of the first step. Empty if that step is timed, or if only the variant has them."""
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.phases = PhaseTimer(context.device)
        self.times_phases = problem.phase_steps > 0
        self.graph: StepGraph | None = None
        self.graph_gib = 0.0
        self.graph_marks: Sequence[Mark] = ()
        self.progress = ProgressLines(problem, context)
        self.costs = costs(problem, variant, context, self.gemm_tflops)

    def step(self) -> None:
        """Train one step, and time its phases if the problem asks for that."""
        if not self.times_phases:
            self.train()
        elif self.graph is not None:
            self.train()
            self.phases.end_replay(self.graph_marks)
        else:
            self.train(self.phases.mark)
            self.phases.end_step()

    def train(self, mark: MarkPhase = ignore_phase) -> None:
        """Train one step and call `mark` at the beginning of each phase, or replay the graph if there is one."""
        if self.graph is not None:
            loss, norm = self.graph.replay(self.batches)
        else:
            with on_stream(self.stream):
                loss = self.trainer.accumulate(self.batches, mark)
                if not self.losses and self.problem.warmup_steps and isinstance(self.trainer, TorchTrainer):
                    self.gradients = gradient_norms(self.trainer)
                norm = self.trainer.update(mark)
        if self.from_outside:
            for number in (loss, norm):
                require(number, Tensor, self.variant, "accumulate or update")
            loss, norm = loss.detach().clone(), norm.detach().clone()
        self.losses.append(loss)
        self.norms.append(norm)

    def capture(self) -> float:
        """Make all later steps replays of a CUDA graph, and return the GiB that the graph keeps. Collective."""
        self.restore()
        mark = self.phases.mark if self.problem.phase_steps else ignore_phase
        with rank_memory.extra_peak(self.context.device) as peak:
            self.graph = StepGraph(self.trainer, self.batches, mark, self.stream)
        self.graph_marks = self.phases.taken_marks()
        self.graph_gib = peak.peak_gib[0]
        return self.graph_gib

    def restore(self) -> None:
        """Make the next step's batches, and write a progress line if one is due."""
        step, context = len(self.losses), self.context
        self.phases.read()
        self.progress.report(step, self.losses)
        self.batches = replica_batches(self.problem, step, context.dp_rank, context.dp_size, context.device)

    def release(self) -> None:
        """Do nothing: a step leaves nothing to free."""

    def check(self) -> Verdict:
        """Compare the first steps, and the timed ones of a variant from outside, with the reference. Collective."""
        problem, reference = self.problem, self.reference
        self.progress.report(len(self.losses), self.losses)
        losses, norms = self._trajectories()
        wrong = reference.complaint(losses, norms, problem.dtype)
        if reference.timed is not None and wrong is None:
            wrong = reference.timed.complaint(losses[problem.warmup_steps :], problem.dtype)
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
        return Verdict(columns, self._with_place(wrong))

    def _with_place(self, wrong: str | None) -> str | None:
        """Return why the result of some rank is wrong, on every rank, or None.

        A rank counts first whose gradients of the first step differ. Collective.
        """
        place = self.reference.wrong_gradients(self.gradients, self.problem.dtype) if wrong else None
        ranks = [(rank, *texts) for rank, texts in enumerate(gather_objects((wrong, place)))]
        for rank, wrong, place in sorted(ranks, key=lambda texts: not texts[2]):
            if wrong:
                return f"rank {rank}: {'; '.join(filter(None, (wrong, place)))}"
        return None

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return throughput and times of phases, and profile an additional step on request. Collective."""
        result = throughput(self.problem, self.context, columns)
        if self.problem.phase_steps:
            result |= phase_columns(self.phases.times_ms(self.problem.steps))
            self.times_phases = False  # reading the times of further steps would wait for each of them
        if self.problem.profile:
            self.context.say("profiling")
            self.restore()
            dist.barrier()
            keep_trace(profiled(self.train, self.context), self.context)
        return result

    def _trajectories(self) -> tuple[list[float], list[float]]:
        """Return the loss of every step, the mean over replicas, and the gradient norm of every step."""
        both = torch.stack([torch.stack(self.losses), torch.stack(self.norms)]).double().cpu()
        losses = both[0].contiguous()
        dist.all_reduce(losses, group=self.context.dp_group)
        return (losses / self.context.dp_size).tolist(), both[1].tolist()


def costs(problem: TrainStep, variant: Variant, context: Context, tflops: float) -> Costs:
    """Return the unavoidable costs of a step on one rank. The floor is the longer of compute and memory.

    Compute: this rank's operations of matrix products at `tflops`, the measured rate of a large product in TFLOP/s.
    Memory: each parameter and both of its moments, read once and written once, spread evenly over the ranks.
    """
    states = 3 * parameters(problem) * ITEM_BYTES[problem.stored_dtype] // context.world_size
    sent = bytes_communicated(problem, variant.name, context.tp_size, context.dp_size)
    flops = step_flops(problem) // context.tp_size
    return Costs(bytes_moved=2 * states, bytes_communicated=sent, flops=flops, compute_ms=compute_ms(flops, tflops))


def setup(problem: TrainStep, variant: Variant, context: Context) -> TrainStepSession:
    """Return the session of one cell on this rank."""
    if context.device.type == "cuda":
        from tpbench.kernels.collectives import forbid_multicast

        forbid_multicast()  # before NCCL makes its communicators, which it does later
    return TrainStepSession(problem, variant, context)
