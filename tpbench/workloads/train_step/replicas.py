"""ddp: every rank has the whole model, and gradients are averaged by all-reduce while the backward pass runs."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from tpbench.workloads.train_step import losses, models
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.trainer import Place, TorchTrainer


def ddp(problem: TrainStep, place: Place) -> TorchTrainer:
    """torch's DistributedDataParallel over the data-parallel group; micro-batches but the last stay local."""
    context = place.context
    model = models.build(problem)
    models.materialise(model, context.device, problem.seed)
    if problem.compile:
        models.compile_layers(model)
    devices = [context.device.index] if context.device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        model, device_ids=devices, process_group=context.dp_group, gradient_as_bucket_view=True
    )

    def last_micro(last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else wrapped.no_sync()

    return TorchTrainer(problem, wrapped, context, losses.whole(problem), last_micro=last_micro)


def alone(problem: TrainStep, place: Place) -> TorchTrainer:
    """The whole model on this rank and nothing distributed, just as its package has it: what the oracle runs."""
    model = models.build(problem, fused_norms=False)
    models.materialise(model, place.context.device, problem.seed)
    return TorchTrainer(problem, model, place.context, losses.torch_loss)
