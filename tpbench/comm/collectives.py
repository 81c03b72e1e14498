"""Collectives for whole tensors, for rows of matrices and for Python objects, and how to differentiate them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpbench.kernels.collectives import all_gather as all_gather
from tpbench.kernels.collectives import gather_values, machine_id, same_machine
from tpbench.kernels.collectives import reduce_scatter as reduce_scatter


def gather_rows(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return (size * rows, n): the (rows, n) shards of all ranks, in rank order. Collective.

    In compiled code it is a functional collective, which the compiler can move or fuse.
    """
    if torch.compiler.is_compiling():
        return functional_collectives.all_gather_tensor(shard, 0, group)
    whole = shard.new_empty(group.size() * len(shard), shard.shape[1])
    all_gather(whole, shard.contiguous(), group=group)
    return whole


def scatter_rows(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the (rows, n) matrices of all ranks and return this rank's (rows / size, n) of the sum. Collective.

    In compiled code it is a functional collective, as in `gather_rows`.
    """
    if torch.compiler.is_compiling():
        return functional_collectives.reduce_scatter_tensor(whole, "sum", 0, group)
    shard = whole.new_empty(len(whole) // group.size(), whole.shape[1])
    reduce_scatter(shard, whole.contiguous(), group=group)
    return shard


Exchange: TypeAlias = Callable[[Tensor, dist.ProcessGroup], Tensor]
"""Exchanges a tensor between the ranks of a group."""


def exchanged(tensor: Tensor, group: dist.ProcessGroup, forward: Exchange, backward: Exchange) -> Tensor:
    """Return `forward(tensor, group)`, whose gradient is `backward` of the result's gradient."""
    return _Exchanged.apply(tensor, group, forward, backward)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.group, ctx.exchange = group, backward
        return forward(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.exchange(gradients[0], ctx.group), None, None, None


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return one value from each rank, in rank order, as JSON returns it: a tuple comes back as a list. Collective.

    The group needs a backend for the CPU.
    """
    return gather_values(value, group, torch.device("cpu"))


def on_one_machine(group: dist.ProcessGroup) -> bool:
    """Return true if all ranks run under one Linux kernel. Collective, with the same answer on every rank."""
    return same_machine(gather_objects(machine_id(), group))


def sharded_along(dim: int, size: int, local: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor of three dimensions, of which each rank of the mesh has the shard `local` along one of them.

    DTensor itself would derive the size of that dimension from one shard, as if all were equal.

    Args:
        dim: The sharded dimension.
        size: The size of that dimension over all ranks.
        local: This rank's shard.
        mesh: A mesh of one dimension.
    """
    whole = list(local.shape)
    whole[dim] = size
    shape, stride = torch.Size(whole), (whole[1] * whole[2], whole[2], 1)
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
