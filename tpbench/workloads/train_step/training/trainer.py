"""The interface between a variant and the session, and the trainer of plain torch."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from tpbench.measure.session import Context
from tpbench.workloads.train_step.model.inputs import Batch, model_inputs
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.training.losses import Loss, local_shard

FIRST_LOSS_SCALE, STEPS_TO_DOUBLE = 2.0**16, 2000
"""The factor on an fp16 loss at first, and the steps without an overflow after which it doubles, as torch's GradScaler
has them. After an overflow it is halved."""

MarkPhase = Callable[[str], None]
"""Callback at the beginning of a phase, with its name."""


def ignore_phase(phase: str) -> None:
    """Do nothing at the beginning of a phase."""


@runtime_checkable
class Trainer(Protocol):
    """A variant on this rank. A step is `accumulate`, then `update`; neither waits for the device without need.

    If it has an attribute `model`, a module, the module's weights are compared over the replicas after the last step.
    """

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
        self.optimizer: Any = adamw(self.shards, problem, context)
        self.inputs = model_inputs(problem, context.device)
        self.loss_scale: Tensor | None = None
        """Factor on the loss, by which small fp16 gradients don't round to 0 (arXiv:1710.03740, section 3.2)."""
        if problem.dtype == "float16":
            self.loss_scale = torch.full((), FIRST_LOSS_SCALE, device=context.device)
            self.steps_without_overflow = torch.zeros((), dtype=torch.int32, device=context.device)

    def accumulate(self, batches: Sequence[Batch], mark: MarkPhase = ignore_phase) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self.context.device)
        for index, batch in enumerate(batches):
            with self.during_micro_batch(index == len(batches) - 1):
                mark("forward")
                with autocast(self.problem, self.context.device):
                    logits = self.model(input_ids=batch.tokens, **self.inputs).logits
                    loss = self.loss(logits, batch.labels) / len(batches)
                mark("backward")
                (loss if self.loss_scale is None else loss * self.loss_scale).backward()
            total += local_shard(loss.detach())
        return total

    @torch.no_grad()
    def update(self, mark: MarkPhase = ignore_phase) -> Tensor:
        mark("optimizer")
        norm, scale = total_norm(self.parameters, self.context.device), self.loss_scale
        divisor = None if scale is None else scale.clone()
        if divisor is not None:
            norm = norm / divisor
        if (most := self.problem.max_grad_norm) is not None:
            clipped = ((norm + 1e-6) / most).clamp(min=1.0)
            divisor = clipped if divisor is None else clipped * divisor
        # The optimizer divides while it updates. A pass over the gradients would cost a third of the update.
        self.optimizer.grad_scale = divisor
        if scale is not None:
            # All ranks have this norm, so they skip the same updates: the optimizer's kernel reads `found_inf`.
            self.optimizer.found_inf = torch.logical_not(norm.isfinite()).float()
            torch._amp_update_scale_(
                scale, self.steps_without_overflow, self.optimizer.found_inf, 2.0, 0.5, STEPS_TO_DOUBLE
            )
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad = None if parameter.grad is None else local_shard(parameter.grad)
        self.optimizer.step()
        for tensor in (*self.parameters, *self.shards):
            tensor.grad = None
        return norm


def adamw(parameters: Sequence[Tensor], problem: TrainStep, context: Context) -> torch.optim.Optimizer:
    """Return the optimizer of every variant. It divides the gradients by its attribute `grad_scale`, if that is set."""
    capturable = context.graph and context.device.type == "cuda"
    return torch.optim.AdamW(
        parameters, lr=problem.learning_rate, weight_decay=problem.weight_decay, fused=True, capturable=capturable
    )


def autocast(problem: TrainStep, device: torch.device) -> AbstractContextManager[Any]:
    """Return torch's autocast context: matrix products in the problem's dtype, if `problem.autocast` is set."""
    return torch.autocast(device.type, getattr(torch, problem.dtype), enabled=problem.autocast)


@torch.no_grad()  # without gradients, a DTensor returns its shard at once
def total_norm(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the 2-norm of all gradients together, an fp32 scalar that is equal on every rank.

    Each rank sums the squares of its shards in fp32. A gradient that is sharded over a mesh dimension is summed over
    that dimension; a replicated gradient counts once. Parameters may be on several meshes or on none. Raises TypeError
    for a gradient that has not been reduced.
    """
    shards_by_layout: dict[Any, list[Tensor]] = defaultdict(list)  # hundreds of gradients have only a few layouts
    for grad in (parameter.grad for parameter in parameters):
        if grad is not None:
            layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            shards_by_layout[layout].append(local_shard(grad))
    squares_by_groups: dict[tuple[Any, ...], Tensor] = defaultdict(lambda: torch.zeros((), device=device))
    for layout, shards in shards_by_layout.items():
        mesh, placements = layout or (cast("Any", None), ())
        if partial := [placement for placement in placements if placement.is_partial()]:
            raise TypeError(f"a gradient that is {partial[0]} has not been reduced")
        sharded = [number for number, placement in enumerate(placements) if not isinstance(placement, Replicate)]
        groups = tuple(mesh.get_group(number) for number in sharded if mesh.size(number) > 1)
        squares_by_groups[groups] += torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float32)).square().sum()
    for groups, squares in squares_by_groups.items():
        for group in groups:
            dist.all_reduce(squares, group=group)
    return torch.stack([torch.zeros((), device=device), *squares_by_groups.values()]).sum().sqrt()
