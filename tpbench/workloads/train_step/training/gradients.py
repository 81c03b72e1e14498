"""The gradient norm over all shards, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


@torch.no_grad()  # without gradients, a DTensor returns its shard at once
def total_norm(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the 2-norm of all gradients together, an fp32 scalar that is equal on every rank.

    Each rank sums the squares of its shards in fp32. A gradient that is sharded over a mesh dimension is summed over
    that dimension; a replicated gradient counts once. Parameters may be on several meshes or on none. Raises TypeError
    for a gradient that has not been reduced.
    """
    shards_by_groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    groups_by_layout: dict[Any, tuple[Any, ...]] = {}  # hundreds of gradients have only a few layouts
    for grad in (parameter.grad for parameter in parameters):
        if grad is None:
            continue
        layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        if layout not in groups_by_layout:
            groups_by_layout[layout] = _groups_that_shard(grad)
        shards_by_groups[groups_by_layout[layout]].append(local_shard(grad))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for groups, shards in shards_by_groups.items():
        squares = torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float32)).square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    return total.sqrt()


def _groups_that_shard(grad: Tensor) -> tuple[Any, ...]:
    """Return the process groups over which a gradient is sharded."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    groups = []
    for dimension, placement in enumerate(grad.placements):
        if placement.is_partial():
            raise TypeError(f"a gradient that is {placement} has not been reduced")
        if not isinstance(placement, Replicate) and mesh.size(dimension) > 1:
            groups.append(mesh.get_group(dimension))
    return tuple(groups)


def clip_divisor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """Return the number, an fp32 scalar, that scales gradients of this norm down to `max_norm` if they are divided by
    it. None: there is no largest norm.

    An optimizer divides while it updates (`grad_scale`). A pass of its own over the gradients would cost as much as a
    third of the update.
    """
    return None if max_norm is None else ((norm + 1e-6) / max_norm).clamp(min=1.0)


def local_shard(value: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor is returned as it is."""
    return value.to_local() if isinstance(value, DTensor) else value
