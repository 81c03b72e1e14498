"""What a variant hands to the session: something that trains, step by step; and the one for plain torch loops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpbench.measure.session import Context
from tpbench.workloads.train_step.batches import Batch
from tpbench.workloads.train_step.gradients import LossScale, clip, local, total_norm
from tpbench.workloads.train_step.models import causal_mask
from tpbench.workloads.train_step.problem import TrainStep

Mark = Callable[[str], None]
"""Called with a phase's name as it begins: forward, backward, optimizer."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean cross-entropy from logits (batch, sequence, vocabulary or a shard of it) and labels (batch, sequence)."""


def no_mark(phase: str) -> None:
    """Nobody is interested in phases."""


@dataclass(frozen=True)
class Place:
    """What a variant is prepared with."""

    context: Context


class Trainer(Protocol):
    """A variant on this rank. A step is `accumulate`, then `update`; nothing in either waits for the device without
    need."""

    model: Any
    """The transformers model, sharded or wrapped; parameter names end as they do in the plain model."""

    def accumulate(self, batches: Sequence[Batch], mark: Mark = no_mark) -> Tensor:
        """Forward and backward of this replica's micro-batches: their mean loss, fp32 scalar on the device. Gradients
        are then those of the mean loss of all replicas' micro-batches, wherever the variant keeps them."""

    def update(self, mark: Mark = no_mark) -> Tensor:
        """Clip, step and clear the gradients: their norm before clipping, of the whole model, fp32 scalar."""


class TorchTrainer:
    """Forward, backward and update as torch has them; what is distributed hides in the model and its parameters."""

    def __init__(
        self,
        problem: TrainStep,
        model: Any,
        context: Context,
        loss: Loss,
        *,
        last_micro: Callable[[bool], AbstractContextManager[Any]] = lambda last: contextlib.nullcontext(),
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """`last_micro(last)`: held during a micro-batch; gradients need to meet only in the last. `around`: held during
        forward and backward."""
        self.problem, self.model, self.context, self.loss = problem, model, context, loss
        self.last_micro, self.around = last_micro, around
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        # Of what this rank holds: the optimizer works element by element, and on DTensors its host time is tenfold.
        self.shards = [local(each.detach()) if isinstance(each, DTensor) else each for each in self.parameters]
        self.optimizer = adamw(self.shards, problem, context.device)
        self.inputs = model_inputs(problem, context.device)
        self.scale = LossScale() if problem.dtype == "float16" else None

    def accumulate(self, batches: Sequence[Batch], mark: Mark = no_mark) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self.context.device)
        for index, batch in enumerate(batches):
            with self.last_micro(index == len(batches) - 1), self.around():
                mark("forward")
                with autocast(self.problem, self.context.device):
                    logits = self.model(input_ids=batch.tokens, **self.inputs).logits
                    loss = self.loss(logits, batch.labels) / len(batches)
                mark("backward")
                (loss if self.scale is None else loss * self.scale.factor).backward()
            total += local(loss.detach())
        return total

    @torch.no_grad()
    def update(self, mark: Mark = no_mark) -> Tensor:
        mark("optimizer")
        norm = total_norm(self.parameters, self.context.device)
        if self.scale is not None:
            norm = norm / self.scale.factor
        if self.scale is None or self.scale.finite(norm):
            clip(self.parameters, norm, self.problem.max_grad_norm, 1.0 if self.scale is None else self.scale.used)
            for parameter, shard in zip(self.parameters, self.shards, strict=True):
                shard.grad = None if parameter.grad is None else local(parameter.grad)
            self.optimizer.step()
        for each in (*self.parameters, *self.shards):
            each.grad = None
        return norm


def adamw(parameters: Sequence[Tensor], problem: TrainStep, device: torch.device) -> torch.optim.AdamW:
    """The optimizer of every variant; in one fused kernel on GPUs."""
    fused = device.type == "cuda"
    return torch.optim.AdamW(
        parameters, lr=problem.learning_rate, weight_decay=problem.weight_decay, fused=fused, foreach=not fused
    )


def autocast(problem: TrainStep, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in the problem's dtype where its parameters are in another."""
    return torch.autocast(device.type, getattr(torch, problem.dtype), enabled=problem.autocast)


def model_inputs(problem: TrainStep, device: torch.device) -> dict[str, Any]:
    """What a model's forward pass is given beside tokens. Positions are explicit: a rank of a sequence-parallel group
    sees a share of the tokens and would count from its own start."""
    positions = torch.arange(problem.seq_length, device=device)[None]
    return {"position_ids": positions, "attention_mask": causal_mask(problem, device), "use_cache": False}
