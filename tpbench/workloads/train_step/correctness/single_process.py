"""Reference computations of one process: the first training steps, or only the first loss of a model of any size."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tpbench.measure import memory
from tpbench.measure.session import Context
from tpbench.workloads.train_step.model import models
from tpbench.workloads.train_step.model.decoder_parts import modules_in_order
from tpbench.workloads.train_step.model.inputs import model_inputs
from tpbench.workloads.train_step.model.weights import fill
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.training import losses
from tpbench.workloads.train_step.training.batches import Batch, micro_batch, replica_batches, rolled
from tpbench.workloads.train_step.training.trainer import TorchTrainer, autocast


def single_process_trainer(problem: TrainStep, context: Context) -> TorchTrainer:
    """Return a trainer of the whole model on this rank, with nothing distributed and with transformers' own norms."""
    model = models.build(problem, fused_norms=False)
    models.materialise(model, context.device, problem.seed)
    return TorchTrainer(problem, model, context, losses.torch_loss)


def train_first_steps(problem: TrainStep, steps: int, context: Context, changes: Sequence[int] = ()) -> torch.Tensor:
    """Train on the micro-batches of all replicas, then on the last ones rolled by each of `changes` positions.

    Return (3, steps + changes) float64 on the CPU: losses, gradient norms, and the losses that the changed batches have
    after the warm-up; the last row is 0 for other batches. All numbers are NaN if memory does not suffice.
    """
    count = steps + len(changes)
    result = torch.zeros(3, count, dtype=torch.float64)
    try:
        trainer = single_process_trainer(problem, context)
        last = _global_batches(problem, steps - 1, context)
        changed = [rolled(last, positions) for positions in changes]
        for step in range(count):
            if step == problem.warmup_steps:
                result[2, steps:] = torch.tensor([_loss(trainer, each) for each in changed])
            batches = changed[step - steps] if step >= steps else _global_batches(problem, step, context)
            result[0, step], result[1, step] = float(trainer.accumulate(batches)), float(trainer.update())
    except (RuntimeError, MemoryError) as error:
        if memory.shortage(error) is None:
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
def _loss(trainer: TorchTrainer, batches: Sequence[Batch]) -> float:
    """Return the mean loss of micro-batches by forward passes."""
    total = 0.0
    for batch in batches:
        with autocast(trainer.problem, trainer.context.device):
            logits = trainer.model(input_ids=batch.tokens, **trainer.inputs).logits
        total += float(trainer.loss(logits, batch.labels)) / len(batches)
    return total


@torch.no_grad()
def first_loss(problem: TrainStep, context: Context) -> float:
    """Return the first step's loss, the mean over all replicas, by a forward pass. Collective.

    Every rank computes its replica's loss alone. It holds the weights of one layer at a time.
    """
    model = models.build(replace(problem, activation_checkpointing=False)).eval()
    models.place_buffers(model, context.device)
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
        total += float(losses.torch_loss(logits, batch.labels)) / problem.accumulate
        del logits
    dist.all_reduce(total, group=context.dp_group)
    return float(total) / context.dp_size


def _hold_weights_only_in_forward(part: nn.Module, name: str, seed: int, device: torch.device) -> None:
    def make(module: nn.Module, inputs: Any) -> None:
        models.allocate(module, device)
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
