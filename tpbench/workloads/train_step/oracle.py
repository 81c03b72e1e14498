"""The reference of a run, and the comparison of a run with it.

The reference is the same training by one process or, if that costs too much, a forward pass. It starts from the same
bits and uses the micro-batches of all replicas and the same dtypes. It runs eagerly, with torch's loss and nothing
sharded. Rank 0 trains the first `STEPS` steps if two estimates are small enough. The whole model's parameters,
gradients, states and activations must fit into `MEMORY_SHARE` of that rank's free memory, and the steps must take at
most `MAX_FLOPS` operations. Otherwise every rank computes only the first step's loss, by a forward pass that holds the
weights of one layer at a time. This is possible for any model but checks no gradients.

For a variant from outside this package, rank 0 trains all steps if they take at most `MAX_FLOPS`, too. The reference's
`source` says what it checks.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tpbench.measure import rank_memory
from tpbench.measure.session import Context
from tpbench.workloads.train_step.estimates import estimate_memory, step_flops
from tpbench.workloads.train_step.model import models
from tpbench.workloads.train_step.model.inputs import micro_batch, model_inputs, replica_batches
from tpbench.workloads.train_step.model.models import allocate, fill, place_buffers
from tpbench.workloads.train_step.problem import NORM_GROWTH, TrainStep
from tpbench.workloads.train_step.training.trainer import TorchTrainer, autocast, torch_loss

STEPS = 3
UNCHECKED = "; later steps are not checked"
"""End of the `source` of a reference that is cheaper than a variant from outside needs."""
MEMORY_SHARE = 0.7
MAX_FLOPS = {"cpu": 2e12, "cuda": 3e16}
"""By kind of device: about half a minute."""
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3, "float16": 2e-3}
"""Relative tolerance of each compared step's loss, by dtype. Sums over shards round differently; after an update in
bf16, weights do too."""
NORM_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 2e-2}
"""Relative tolerance of the first step's gradient norm, by dtype. Each later step multiplies it by NORM_GROWTH."""
TIMED_TOLERANCE = {"float32": 5e-4, "bfloat16": 5e-3, "float16": 5e-3}
"""Least tolerance of the median error of timed losses, by dtype. The largest median error of correct rows on GPUs is
1.5e-3 in bf16 and, with a moderate learning rate on a CPU, 1e-5 in fp32."""
TIMED_SHARE = 0.2
"""Tolerance of the median error as a share of what training changes. In tiny models with a far too high learning rate
(1e-2), the losses of correct variants differ by 0.08 of it."""
TIMED_OUTLIER = 10.0
"""A single error may be this many times the tolerance of the median error. Right after a spike of the gradient norm,
correct rows differ by up to 1.3e-2 in bf16 and 3e-3 in fp32."""


@dataclass(frozen=True)
class TimedLosses:
    """Correct losses of the timed steps. Errors are shares of the first loss.

    Small differences grow with each update, so that these steps are not compared as closely as the first ones. How fast
    they grow depends on the learning rate. The tolerance is therefore a share of what training changes: the difference
    between the correct losses and the last one of the warm-up.
    """

    first: float
    last_of_warmup: float
    losses: tuple[float, ...]

    def complaint(self, losses: Sequence[float], dtype: str) -> str | None:
        """Return why losses of the timed steps are wrong, or None."""
        errors = self._errors(losses)
        allowed = max(TIMED_TOLERANCE[dtype], TIMED_SHARE * median(self._errors(self._constant)))
        limits = {"median": (median(errors), allowed), "largest": (max(errors), TIMED_OUTLIER * allowed)}
        for kind, (error, limit) in limits.items():
            if error > limit:
                return (
                    f"the {kind} error of the losses of the timed steps is {error:.3g} of the first loss, above "
                    f"{limit:.3g} ({dtype}): the variant does not train in every step as in the first ones"
                )
        return None

    def shows_updates(self, dtype: str) -> bool:
        """Return True if a variant that trains only while it warms up is wrong by `complaint`."""
        return self.complaint(self._constant, dtype) is not None

    @property
    def _constant(self) -> list[float]:
        return [self.last_of_warmup] * len(self.losses)

    def _errors(self, losses: Sequence[float]) -> list[float]:
        errors = [abs(one - other) / self.first for one, other in zip(self.losses, losses, strict=True)]
        return [error if error == error else float("inf") for error in errors]


@dataclass(frozen=True)
class Reference:
    """Correct losses and gradient norms of the first steps, in order."""

    source: str
    """The computation that gave them."""
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    """Empty if only a forward pass was affordable."""
    timed: TimedLosses | None = None
    """Losses of the rest of the run. None: only the first steps are compared."""


@dataclass(frozen=True)
class ReferenceErrors:
    """Relative errors of a run against the reference."""

    loss_error: float
    norm_errors: tuple[float, ...]
    """One error for each compared step."""

    @property
    def grad_error(self) -> float | None:
        """The largest error of a norm, or None if no norm was compared."""
        return max(self.norm_errors, default=None)

    def complaint(self, dtype: str) -> str | None:
        """Return why the run is wrong, or None."""
        wrong = []
        if not self.loss_error <= LOSS_TOLERANCE[dtype]:
            wrong.append(f"loss_error {self.loss_error:.3g} is above {LOSS_TOLERANCE[dtype]:.3g}")
        for step, error in enumerate(self.norm_errors):
            allowed = NORM_TOLERANCE[dtype] * NORM_GROWTH**step
            if not error <= allowed:
                wrong.append(f"grad_error {error:.3g} of the norm at step {step + 1} is above {allowed:.3g}")
                break
        return f"{' and '.join(wrong)} ({dtype})" if wrong else None


def compare(reference: Reference, losses: Sequence[float], norms: Sequence[float]) -> ReferenceErrors:
    """Return the relative errors of a run, the largest of all losses and each norm's. NaN becomes infinite."""

    def errors(expected: Sequence[float], actual: Sequence[float]) -> tuple[float, ...]:
        relative = (abs(a - b) / max(abs(b), 1e-12) for b, a in zip(expected, actual, strict=False))
        return tuple(error if error == error else float("inf") for error in relative)

    return ReferenceErrors(max(errors(reference.losses, losses)), errors(reference.norms, norms))


def compute_reference(problem: TrainStep, context: Context, *, whole_run: bool = False) -> Reference:
    """Return the problem's reference. Collective. Call it before the model is made; it keeps no memory.

    `whole_run`: compare all timed steps, too, if one process can train them.
    """
    total = problem.warmup_steps + problem.steps
    plain = replace(problem, activation_checkpointing=True, compile=False, train_loss="torch")
    if whole_run and (trained := _trained(plain, total, context)) is not None:
        losses, norms = (tuple(row) for row in trained.tolist())
        timed = TimedLosses(losses[0], losses[max(problem.warmup_steps - 1, 0)], losses[problem.warmup_steps :])
        unseen = "" if timed.shows_updates(problem.dtype) else "; skipped updates would not show"
        return Reference(f"all {total} steps by one process{unseen}", losses[:STEPS], norms[:STEPS], timed)
    unchecked = UNCHECKED if whole_run else ""
    if (trained := _trained(plain, min(STEPS, total), context)) is not None:
        losses, norms = (tuple(row) for row in trained.tolist())
        return Reference(f"{len(losses)} steps by one process{unchecked}", losses, norms)
    context.say("oracle: the first step's loss by a forward pass")
    loss = first_loss(plain, context)
    _free_memory(context.device)
    return Reference(f"loss of the first step by a forward pass{unchecked}", (loss,), ())


def _trained(problem: TrainStep, steps: int, context: Context) -> torch.Tensor | None:
    """Return what `train_first_steps` returns, on every rank, or None if it costs too much. Collective."""
    affordable = torch.tensor(_affordable(problem, steps, context))
    dist.broadcast(affordable, src=0)
    if not affordable:
        return None
    context.say(f"oracle: {steps} steps by one process")
    trained = torch.empty(2, steps, dtype=torch.float64)
    if context.rank == 0:
        trained = train_first_steps(problem, steps, context)
    _free_memory(context.device)
    dist.broadcast(trained, src=0)
    return trained if trained.isfinite().all() else None


def _affordable(problem: TrainStep, steps: int, context: Context) -> bool:
    needed = estimate_memory(problem, "ddp", 1, 1).total
    flops = step_flops(problem) * context.dp_size * steps
    available = MEMORY_SHARE * rank_memory.available_bytes(context.device)
    return needed <= available and flops <= MAX_FLOPS[context.device.type]


def single_process_trainer(problem: TrainStep, context: Context) -> TorchTrainer:
    """Return a trainer of the whole model on this rank, with nothing distributed and with transformers' own norms."""
    model = models.build(problem, fused_norms=False)
    models.materialise(model, context.device, problem.seed)
    return TorchTrainer(problem, model, context, torch_loss)


def train_first_steps(problem: TrainStep, steps: int, context: Context) -> torch.Tensor:
    """Train on the micro-batches of all replicas. Return losses and gradient norms, (2, steps) float64 on the CPU. All
    numbers are NaN if memory does not suffice."""
    result = torch.zeros(2, steps, dtype=torch.float64)
    try:
        trainer = single_process_trainer(problem, context)
        for step in range(steps):
            batches = [
                micro_batch(problem, step, micro, replica, context.dp_size, context.device)
                for micro in range(problem.accumulate)
                for replica in range(context.dp_size)
            ]
            result[0, step], result[1, step] = float(trainer.accumulate(batches)), float(trainer.update())
    except (RuntimeError, MemoryError) as error:
        if rank_memory.shortage(error) is None:
            raise
        result.fill_(torch.nan)
    return result


@torch.no_grad()
def first_loss(problem: TrainStep, context: Context) -> float:
    """Return the first step's loss, the mean over all replicas, by a forward pass. Collective.

    Every rank computes its replica's loss alone. It holds the weights of one layer at a time.
    """
    model = models.build(replace(problem, activation_checkpointing=False)).eval()
    place_buffers(model, context.device)
    names = {module: f"{name}." for name, module in model.named_modules()}
    if problem.tied:
        names[model.lm_head] = names[model.get_input_embeddings()]
    for part in models.modules_in_order(model):
        _hold_weights_only_in_forward(part, names[part], problem.seed, context.device)
    inputs = model_inputs(problem, context.device)
    total = torch.zeros((), dtype=torch.float64)
    for batch in replica_batches(problem, 0, context.dp_rank, context.dp_size, context.device):
        with autocast(problem, context.device):
            logits = model(input_ids=batch.tokens, **inputs).logits
        total += float(torch_loss(logits, batch.labels)) / problem.accumulate
        del logits
    dist.all_reduce(total, group=context.dp_group)
    return float(total) / context.dp_size


def _hold_weights_only_in_forward(part: nn.Module, name: str, seed: int, device: torch.device) -> None:
    def make(module: nn.Module, inputs: Any) -> None:
        allocate(module, device)
        fill(module, name, seed)

    def drop(module: nn.Module, inputs: Any, output: Any) -> None:
        for owner in module.modules():
            for parameter_name, parameter in list(owner.named_parameters(recurse=False)):
                setattr(owner, parameter_name, nn.Parameter(parameter.detach().to("meta")))

    part.register_forward_pre_hook(make)
    part.register_forward_hook(drop)


def _free_memory(device: torch.device) -> None:
    """Free the memory of models that are no longer used."""
    gc.collect()  # the hooks and the parameters of a module refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
