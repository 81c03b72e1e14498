"""What a rank does with the train step: ask the oracle, set a variant up, train, and say how fast and how right."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tpbench.measure import memory
from tpbench.measure.gemm import compute_ms, gemm_tflops
from tpbench.measure.session import Context, Costs, IterationSchedule, Verdict
from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads import Variant
from tpbench.workloads.train_step import oracle, phases, sizes, speed, trace
from tpbench.workloads.train_step.batches import Batch, micro_batch
from tpbench.workloads.train_step.problem import ITEM_BYTES, TrainStep
from tpbench.workloads.train_step.trainer import Mark, Place, Trainer, no_mark


class TrainStepSession:
    """A variant on this rank, training step after step. Nothing is ever trained twice: a step's batches are made
    before it, outside what is timed, and losses stay on the device until the end."""

    def __init__(self, problem: TrainStep, variant: Variant, context: Context) -> None:
        self.problem, self.context = problem, context
        self.gemm_tflops = gemm_tflops(getattr(torch, problem.dtype), context.device, Stopwatch(context))
        self.right = oracle.expected(problem, context)
        self.schedule = IterationSchedule(
            problem.warmup_steps, problem.steps, held_before=memory.held_bytes(context.device)
        )
        context.say(f"making the model for {variant.name}")
        began = time.perf_counter()
        self.trainer: Trainer = variant.prepare(problem, Place(context))
        self._synchronize()
        self.init_s = time.perf_counter() - began
        self.batches: list[Batch] = []
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []
        self.progress = speed.Progress(problem, context)
        self.costs = costs(problem, variant, context, self.gemm_tflops)

    def step(self) -> None:
        """One step of training."""
        self.train()

    def train(self, mark: Mark = no_mark) -> None:
        """One step of training, which tells `mark` of its phases."""
        self.losses.append(self.trainer.accumulate(self.batches, mark))
        self.norms.append(self.trainer.update(mark))

    def restore(self) -> None:
        """The next step's batches; and a line about the steps so far, now and then."""
        done = len(self.losses)
        self.progress.tell(done, self.losses)
        self.batches = [
            micro_batch(self.problem, done, micro, self.context.dp_rank, self.context.dp_size, self.context.device)
            for micro in range(self.problem.accumulate)
        ]

    def release(self) -> None:
        """Nothing of a step outlives it."""

    def check(self) -> Verdict:
        """Compare the first steps with the oracle's."""
        self.progress.tell(len(self.losses), self.losses)
        losses, norms = self._trajectories()
        errors = oracle.compare(self.right, losses, norms)
        columns = {
            "loss_value": losses[-1],
            "loss_error": errors.loss_error,
            "grad_error": errors.grad_error,
            "grad_norm": norms[-1],
            "losses": losses,
            "grad_norms": norms,
            "oracle": self.right.source,
            "gemm_tflops": self.gemm_tflops,
            "init_s": self._most(self.init_s),
            "steady_gib": self._most((memory.held_bytes(self.context.device) - self.schedule.held_before) / 2**30),
        }
        return Verdict(columns, errors.complaint(self.problem.dtype))

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Throughput; then, by more steps, the phases, the communication that shows, and a trace."""
        found = speed.throughput(self.problem, self.context, columns)
        if self.problem.phase_steps:
            self.context.say("timing phases")
            found |= phases.timed(self.train, self.restore, self.problem.phase_steps, self.context)
        if self.problem.profile or self.context.device.type == "cuda":
            self.context.say("profiling")
            found |= trace.profiled(self.train, self.restore, self.context, keep=self.problem.profile)
        return found

    def _trajectories(self) -> tuple[list[float], list[float]]:
        """Loss of every step, the mean over replicas, and gradient norm."""
        both = torch.stack([torch.stack(self.losses), torch.stack(self.norms)]).double().cpu()
        losses = both[0].contiguous()
        dist.all_reduce(losses, group=self.context.dp_group)
        return (losses / self.context.dp_size).tolist(), both[1].tolist()

    def _most(self, value: float) -> float:
        most = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    def _synchronize(self) -> None:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)


def costs(problem: TrainStep, variant: Variant, context: Context, tflops: float) -> Costs:
    """The operations of the matrix products at the rate that a large one reaches here; or, where that is longer, each
    parameter and both of its moments read once and written once, spread evenly over the ranks."""
    states = 3 * sizes.parameters(problem) * ITEM_BYTES[problem.stored_dtype] // context.world_size
    sent = sizes.bytes_communicated(problem, variant.name, context.tp_size, context.dp_size)
    flops = sizes.step_flops(problem, context.tp_size)
    return Costs(bytes_moved=2 * states, bytes_communicated=sent, flops=flops, compute_ms=compute_ms(flops, tflops))


def setup(problem: TrainStep, variant: Variant, context: Context) -> TrainStepSession:
    """The session of one cell on this rank."""
    if context.device.type == "cuda":
        from tpbench.kernels.symmetric import forbid_multicast

        forbid_multicast()  # of NCCL too, which makes its communicators only now
    return TrainStepSession(problem, variant, context)
