"""What a row is compared with: the same training by one process alone or, where that is too much, a forward pass.

The reference starts from the same bits and sees all replicas' micro-batches, in the same dtypes, eagerly, with torch's
own loss and nothing sharded. It trains the first `STEPS` steps on rank 0 if the whole model's parameters, gradients,
states and activations are expected to take no more than `SHARE` of that rank's free memory and the steps no more than
`FLOPS` operations. Otherwise every rank computes the first step's loss alone, by a forward pass that holds one layer's
weights at a time: that is possible for any model, and says nothing of gradients.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tpbench.measure import memory
from tpbench.measure.session import Context
from tpbench.workloads.train_step import losses, models, sizes
from tpbench.workloads.train_step.batches import Batch, micro_batch
from tpbench.workloads.train_step.problem import NORM_GROWTH, TrainStep
from tpbench.workloads.train_step.replicas import alone
from tpbench.workloads.train_step.trainer import Place, autocast, model_inputs
from tpbench.workloads.train_step.weights import fill

STEPS = 3
SHARE = 0.7
FLOPS = {"cpu": 2e12, "cuda": 3e16}
"""Half a minute or so."""

LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3, "float16": 2e-3}
"""By dtype, of each compared step's loss, relative. Sums over shards round differently; after an update in bf16 so do
weights."""
NORM_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 2e-2}
"""Of the first step's gradient norm, relative; with each step it is multiplied by NORM_GROWTH."""


@dataclass(frozen=True)
class Expected:
    """What is right: of the first steps, in order."""

    source: str
    """What computed it."""
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    """Empty where only a forward pass was affordable."""


@dataclass(frozen=True)
class Errors:
    """How far a run is from that."""

    loss_error: float
    norm_errors: tuple[float, ...]
    """Of each compared step."""

    @property
    def grad_error(self) -> float | None:
        """The largest of the norms' errors, if any was compared."""
        return max(self.norm_errors, default=None)

    def complaint(self, dtype: str) -> str | None:
        """Why the run is not right, or None."""
        wrong = []
        if not self.loss_error <= LOSS_TOLERANCE[dtype]:
            wrong.append(f"loss_error {self.loss_error:.3g} is above {LOSS_TOLERANCE[dtype]:.3g}")
        for step, error in enumerate(self.norm_errors):
            allowed = NORM_TOLERANCE[dtype] * NORM_GROWTH**step
            if not error <= allowed:
                wrong.append(f"grad_error {error:.3g} of the norm at step {step + 1} is above {allowed:.3g}")
                break
        return f"{' and '.join(wrong)} ({dtype})" if wrong else None


def expected(problem: TrainStep, context: Context) -> Expected:
    """What is right for the problem. Collective; leaves no memory behind. Call it before the model is made."""
    steps = min(STEPS, problem.warmup_steps + problem.steps)
    plain = replace(problem, activation_checkpointing=True, compile=False, train_loss="torch")
    affordable = torch.tensor(_affordable(plain, steps, context))
    dist.broadcast(affordable, src=0)
    if affordable:
        context.say(f"oracle: {steps} steps by one process")
        found = torch.full((2, steps), torch.nan, dtype=torch.float64)
        if context.rank == 0:
            with contextlib.suppress(_Shortage):
                found = _trajectory(plain, steps, context)
        _free(context.device)
        dist.broadcast(found, src=0)
        if found.isfinite().all():
            return Expected(f"{steps} steps by one process", tuple(found[0].tolist()), tuple(found[1].tolist()))
    context.say("oracle: the first step's loss by a forward pass")
    loss = _first_loss(plain, context)
    _free(context.device)
    return Expected("loss of the first step by a forward pass", (loss,), ())


def compare(right: Expected, got_losses: Sequence[float], got_norms: Sequence[float]) -> Errors:
    """The largest relative differences; NaN becomes infinite."""
    return Errors(max(_errors(right.losses, got_losses)), tuple(_errors(right.norms, got_norms)))


def _errors(right: Sequence[float], got: Sequence[float]) -> list[float]:
    errors = [abs(mine - its) / max(abs(its), 1e-12) for its, mine in zip(right, got, strict=False)]
    return [error if error == error else float("inf") for error in errors]


def _affordable(problem: TrainStep, steps: int, context: Context) -> bool:
    needed = sizes.memory(problem, "ddp", 1, 1).total
    flops = sizes.step_flops(problem, 1) * context.dp_size * steps
    return needed <= SHARE * memory.available_bytes(context.device) and flops <= FLOPS[context.device.type]


class _Shortage(Exception):
    """The estimate was too low."""


def _trajectory(problem: TrainStep, steps: int, context: Context) -> torch.Tensor:
    """(2, steps): losses and gradient norms. Raises _Shortage where memory does not suffice after all."""
    try:
        return _train(problem, steps, context)
    except (RuntimeError, MemoryError) as error:
        if memory.shortage(error) is None:
            raise
    raise _Shortage  # here, where no traceback keeps the model alive


def _train(problem: TrainStep, steps: int, context: Context) -> torch.Tensor:
    trainer = alone(problem, Place(replace(context, world_size=1, tp_size=1, dp_size=1)))
    found = torch.zeros(2, steps, dtype=torch.float64)
    for step in range(steps):
        everybody = [
            micro_batch(problem, step, micro, replica, context.dp_size, context.device)
            for micro in range(problem.accumulate)
            for replica in range(context.dp_size)
        ]
        found[0, step] = float(trainer.accumulate(everybody))
        found[1, step] = float(trainer.update())
    return found


@torch.no_grad()
def _first_loss(problem: TrainStep, context: Context) -> float:
    """Of the first step, over all replicas: every rank computes its replica's."""
    model = models.build(replace(problem, activation_checkpointing=False)).eval()
    models.place_buffers(model, context.device)
    names = {module: f"{name}." for name, module in model.named_modules()}
    if problem.tied:
        names[model.lm_head] = names[model.model.embed_tokens]
    for part in (model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head):
        _lend(part, names[part], problem.seed, context.device)
    inputs = model_inputs(problem, context.device)
    total = torch.zeros((), dtype=torch.float64)
    for micro in range(problem.accumulate):
        batch: Batch = micro_batch(problem, 0, micro, context.dp_rank, context.dp_size, context.device)
        with autocast(problem, context.device):
            logits = model(input_ids=batch.tokens, **inputs).logits
        total += float(losses.torch_loss(logits, batch.labels)) / problem.accumulate
        del logits
    dist.all_reduce(total, group=context.dp_group)
    return float(total) / context.dp_size


def _lend(part: nn.Module, name: str, seed: int, device: torch.device) -> None:
    """Weights only while it runs."""

    def make(module: nn.Module, inputs: Any) -> None:
        module.to_empty(device=device)
        fill(module, name, seed)

    def take_back(module: nn.Module, inputs: Any, output: Any) -> None:
        module.to("meta")

    part.register_forward_pre_hook(make)
    part.register_forward_hook(take_back)


def _free(device: torch.device) -> None:
    gc.collect()  # a module's hooks and its parameters hold each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
