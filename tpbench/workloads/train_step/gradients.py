"""The gradient's norm over all shards, clipping by it, and the loss scale that fp16 needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


@torch.no_grad()  # in which a DTensor gives its shard at once
def total_norm(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of all gradients together, fp32 scalar, the same on every rank.

    Each rank sums the squares of what it holds in fp32. A mesh dimension over which a gradient is replicated counts it
    once, one over which it is sharded adds it up: parameters on several meshes, or on none, may be mixed.
    """
    held: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    groups: dict[Any, tuple[Any, ...]] = {}  # by layout: hundreds of gradients have a few
    for grad in (each.grad for each in parameters):
        if grad is None:
            continue
        layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        if layout not in groups:
            groups[layout] = _sharded_over(grad)
        held[groups[layout]].append(local(grad))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for over, grads in held.items():
        squares = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum()
        for group in over:
            dist.all_reduce(squares, group=group)
        total += squares
    return total.sqrt()


def _sharded_over(grad: Tensor) -> tuple[Any, ...]:
    """The process groups over which a gradient is sharded."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    over = []
    for dimension, placement in enumerate(grad.placements):
        if placement.is_partial():
            raise TypeError(f"a gradient that is {placement} has not been reduced")
        if not isinstance(placement, Replicate) and mesh.size(dimension) > 1:
            over.append(mesh.get_group(dimension))
    return tuple(over)


@torch.no_grad()
def clip(parameters: Sequence[Tensor], norm: Tensor, max_norm: float | None, scale: float = 1.0) -> None:
    """Divide gradients by `scale`, then scale them down to max_norm if `norm`, of the divided ones, is above it. Does
    not wait for the device."""
    if max_norm is None and scale == 1.0:
        return
    factor = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for each in parameters:
        if each.grad is not None:
            by_dtype[each.grad.dtype].append(local(each.grad))
    for grads in by_dtype.values():
        torch._foreach_mul_(grads, factor / scale)


def local(value: Tensor) -> Tensor:
    """What this rank holds of a DTensor, or the tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


class LossScale:
    """A dynamic factor on the loss that keeps fp16's gradients out of its subnormals (Micikevicius et al. 2018,
    arXiv:1710.03740, section 3.2). Halved, and the step skipped, when a gradient overflows; doubled after `patience`
    steps without. The norm is of all ranks' gradients, so that all decide alike."""

    def __init__(self, factor: float = 2.0**16, patience: int = 2000) -> None:
        self.factor = self.used = factor
        self.patience, self.calm = patience, 0

    def finite(self, norm: Tensor) -> bool:
        """Whether the step counts; adjusts the factor for the next. Waits for the device."""
        self.used = self.factor
        if not bool(torch.isfinite(norm)):
            self.factor, self.calm = self.factor / 2, 0
            return False
        self.calm += 1
        if self.calm == self.patience:
            self.factor, self.calm = self.factor * 2, 0
        return True
