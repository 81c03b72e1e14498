"""Variant ddp: every rank holds the whole model; all-reduces average gradients during the backward pass."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from tpbench.measure.session import Context
from tpbench.workloads.train_step.model import models
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.training import losses
from tpbench.workloads.train_step.training.trainer import TorchTrainer


def ddp(problem: TrainStep, context: Context) -> TorchTrainer:
    """Train with torch's DistributedDataParallel. Gradients are averaged only in the last micro-batch of a step."""
    model = models.build(problem)
    models.materialise(model, context.device, problem.seed)
    if problem.compile:
        models.compile_layers(model)
    loss = losses.loss_of_whole_logits(problem, model)
    devices = [context.device.index] if context.device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        model, device_ids=devices, process_group=context.dp_group, gradient_as_bucket_view=True
    )

    def during_micro_batch(last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else wrapped.no_sync()

    return TorchTrainer(problem, wrapped, context, loss, during_micro_batch)
