"""The interface between a variant and the session: an object that trains step by step, and one for plain torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpbench.measure.session import Context
from tpbench.workloads.train_step.model.inputs import model_inputs
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.training.batches import Batch
from tpbench.workloads.train_step.training.gradients import clip_divisor, local_shard, total_norm
from tpbench.workloads.train_step.training.loss_scale import LossScale
from tpbench.workloads.train_step.training.losses import Loss
from tpbench.workloads.train_step.training.phases import MarkPhase, ignore_phase


@runtime_checkable
class Trainer(Protocol):
    """A variant on this rank. A step is `accumulate`, then `update`; neither waits for the device without need."""

    model: Any
    """The transformers model, sharded or wrapped. Names of its parameters end as in the plain model."""

    def accumulate(self, batches: Sequence[Batch], mark: MarkPhase = ignore_phase) -> Tensor:
        """Run forward and backward pass of this replica's micro-batches and return their mean loss.

        The loss is an fp32 scalar on the device. Afterwards the gradients, which the variant may keep anywhere, are
        those of the mean loss over the micro-batches of all replicas.
        """

    def update(self, mark: MarkPhase = ignore_phase) -> Tensor:
        """Clip the gradients, update the weights and clear the gradients. Return the norm of the whole model's
        gradients before clipping, an fp32 scalar on the device."""


class TorchTrainer:
    """Forward pass, backward pass and update by plain torch. Distribution is inside the model and its parameters."""

    def __init__(
        self,
        problem: TrainStep,
        model: Any,
        context: Context,
        loss: Loss,
        during_micro_batch: Callable[[bool], AbstractContextManager[Any]] = lambda last: contextlib.nullcontext(),
    ) -> None:
        """`during_micro_batch(last)` is entered around forward and backward pass of a micro-batch. Gradients need to be
        reduced only in the last one."""
        self.problem, self.model, self.context, self.loss = problem, model, context, loss
        self.during_micro_batch = during_micro_batch
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # The optimizer works element by element, so it gets this rank's shards. On DTensors the host needs ten times
        # as long.
        self.shards = [
            local_shard(parameter.detach()) if isinstance(parameter, DTensor) else parameter
            for parameter in self.parameters
        ]
        self.optimizer: Any = adamw(self.shards, problem, capturable=capturable(context))
        self.inputs = model_inputs(problem, context.device)
        self.scale = LossScale(device=context.device) if problem.dtype == "float16" else None

    def accumulate(self, batches: Sequence[Batch], mark: MarkPhase = ignore_phase) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self.context.device)
        for index, batch in enumerate(batches):
            with self.during_micro_batch(index == len(batches) - 1):
                mark("forward")
                with autocast(self.problem, self.context.device):
                    logits = self.model(input_ids=batch.tokens, **self.inputs).logits
                    loss = self.loss(logits, batch.labels) / len(batches)
                mark("backward")
                (loss if self.scale is None else loss * self.scale.factor).backward()
            total += local_shard(loss.detach())
        return total

    @torch.no_grad()
    def update(self, mark: MarkPhase = ignore_phase) -> Tensor:
        mark("optimizer")
        norm = total_norm(self.parameters, self.context.device)
        if self.scale is None:
            self.optimizer.grad_scale = clip_divisor(norm, self.problem.max_grad_norm)
        else:
            norm = norm / self.scale.factor
            divisor = clip_divisor(norm, self.problem.max_grad_norm)
            self.optimizer.found_inf = (~self.scale.finite(norm)).float()  # the kernel skips the update if this is 1
            self.optimizer.grad_scale = self.scale.used if divisor is None else self.scale.used * divisor
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad = None if parameter.grad is None else local_shard(parameter.grad)
        self.optimizer.step()
        for tensor in (*self.parameters, *self.shards):
            tensor.grad = None
        return norm


def capturable(context: Context) -> bool:
    """Return whether a CUDA graph will hold the update, whose step counts must then be on the GPU."""
    return context.graph and context.device.type == "cuda"


def adamw(parameters: Sequence[Tensor], problem: TrainStep, *, capturable: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer of every variant. It divides the gradients by its attribute `grad_scale`, if that is set.

    A CUDA graph can hold the update if the optimizer is `capturable`. That of tpbench always is.
    """
    if problem.optimizer == "tpbench":
        from tpbench.kernels.adamw import AdamW

        return AdamW(parameters, lr=problem.learning_rate, weight_decay=problem.weight_decay)
    return torch.optim.AdamW(
        parameters, lr=problem.learning_rate, weight_decay=problem.weight_decay, fused=True, capturable=capturable
    )


def autocast(problem: TrainStep, device: torch.device) -> AbstractContextManager[Any]:
    """Return torch's autocast context: matrix products in the problem's dtype, if `problem.autocast` is set."""
    return torch.autocast(device.type, getattr(torch, problem.dtype), enabled=problem.autocast)
