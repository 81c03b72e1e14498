"""Compute the reference of a run: the same training by one process or, if that costs too much, a forward pass.

The reference starts from the same bits and uses the micro-batches of all replicas and the same dtypes. It runs eagerly,
with torch's loss and nothing sharded. Rank 0 trains the first `STEPS` steps if two estimates are small enough. The
whole model's parameters, gradients, states and activations must fit into `MEMORY_SHARE` of that rank's free memory, and
the steps must take at most `MAX_FLOPS` operations. Otherwise every rank computes only the first step's loss, by a
forward pass that holds the weights of one layer at a time. This is possible for any model but checks no gradients.

For a variant from outside this package, rank 0 trains all steps, if they take at most `MAX_FLOPS`, too. The reference's
`source` says what it checks.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tpbench.measure import rank_memory
from tpbench.measure.session import Context
from tpbench.workloads.train_step.estimates import estimate_memory
from tpbench.workloads.train_step.model import models, sizes
from tpbench.workloads.train_step.model.inputs import Batch, micro_batch, model_inputs, replica_batches
from tpbench.workloads.train_step.model.models import modules_in_order
from tpbench.workloads.train_step.model.weights import allocate, fill, place_buffers
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.reference import LaterReference, Reference
from tpbench.workloads.train_step.training.losses import torch_loss
from tpbench.workloads.train_step.training.trainer import TorchTrainer, autocast

STEPS = 3
UNCHECKED = "; later steps are not checked"
"""End of the `source` of a reference that is too short for the whole run."""
MEMORY_SHARE = 0.7
MAX_FLOPS = {"cpu": 2e12, "cuda": 3e16}
"""By kind of device: about half a minute."""


def compute_reference(problem: TrainStep, context: Context, whole_run: bool = False) -> Reference:
    """Return the problem's reference. Collective. Call it before the model is made; it keeps no memory.

    `whole_run`: train all steps if that is affordable, not only the first ones.
    """
    total = problem.warmup_steps + problem.steps
    plain = replace(problem, activation_checkpointing=True, compile=False, train_loss="torch")
    unchecked = UNCHECKED if whole_run else ""
    if whole_run and (trained := _trained(plain, total, context)) is not None:
        return _of_whole_run(plain, trained)
    if (trained := _trained(plain, min(STEPS, total), context)) is not None:
        losses, norms = trained.tolist()
        return Reference(f"{len(losses)} steps by one process{unchecked}", tuple(losses), tuple(norms))
    context.say("oracle: the first step's loss by a forward pass")
    loss = first_loss(plain, context)
    free_memory(context.device)
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
    free_memory(context.device)
    dist.broadcast(trained, src=0)
    return trained if trained.isfinite().all() else None


def _of_whole_run(problem: TrainStep, trained: torch.Tensor) -> Reference:
    losses, norms = (tuple(numbers) for numbers in trained.tolist())
    warmup = problem.warmup_steps
    later = LaterReference(losses[0], losses[max(warmup - 1, 0)], losses[warmup:])
    source = f"all {len(losses)} steps by one process"
    if not later.shows_updates(problem.dtype):
        source += "; skipped updates would not show"
    return Reference(source, losses[:STEPS], norms[:STEPS], later)


def _affordable(problem: TrainStep, steps: int, context: Context) -> bool:
    needed = estimate_memory(problem, "ddp", 1, 1).total
    flops = sizes.step_flops(problem) * context.dp_size * steps
    available = MEMORY_SHARE * rank_memory.available_bytes(context.device)
    return needed <= available and flops <= MAX_FLOPS[context.device.type]


def single_process_trainer(problem: TrainStep, context: Context) -> TorchTrainer:
    """Return a trainer of the whole model on this rank, with nothing distributed and with transformers' own norms."""
    model = models.build(problem, fused_norms=False)
    models.materialise(model, context.device, problem.seed)
    return TorchTrainer(problem, model, context, torch_loss)


def train_first_steps(problem: TrainStep, steps: int, context: Context) -> torch.Tensor:
    """Train on the micro-batches of all replicas. Return losses and gradient norms, (2, steps) float64 on the CPU.

    All numbers are NaN if memory does not suffice.
    """
    result = torch.zeros(2, steps, dtype=torch.float64)
    try:
        trainer = single_process_trainer(problem, context)
        for step in range(steps):
            batches = _global_batches(problem, step, context)
            result[0, step], result[1, step] = float(trainer.accumulate(batches)), float(trainer.update())
    except (RuntimeError, MemoryError) as error:
        if rank_memory.shortage(error) is None:
            raise
        result.fill_(torch.nan)
    return result


def _global_batches(problem: TrainStep, step: int, context: Context) -> list[Batch]:
    """Return the micro-batches of all replicas in one step."""
    return [
        micro_batch(problem, step, micro, replica, context.dp_size, context.device)
        for micro in range(problem.accumulate)
        for replica in range(context.dp_size)
    ]


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
    for part in modules_in_order(model):
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
            for each, parameter in list(owner.named_parameters(recurse=False)):
                setattr(owner, each, nn.Parameter(parameter.detach().to("meta")))

    part.register_forward_pre_hook(make)
    part.register_forward_hook(drop)


def free_memory(device: torch.device) -> None:
    """Free the memory of models that are no longer used."""
    gc.collect()  # the hooks and the parameters of a module refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
