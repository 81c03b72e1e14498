"""Autograd functions of the tensor-parallel layers: forward and backward under a plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.workloads.tp_block.layers import linear_operations
from tpbench.workloads.tp_block.schedules.base import LinearPlan


class ColumnParallel(torch.autograd.Function):
    """y = all_gather(x) W^T of a shard of x (rows / p, in): y (rows, out / p)."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, weight: Tensor, plan: LinearPlan, save_gathered: bool) -> Tensor:
        gathered, product = linear_operations.column_forward(plan.forward, shard.contiguous(), weight, save_gathered)
        ctx.save_for_backward(gathered if save_gathered else shard, weight)
        ctx.plan, ctx.gathered = plan, save_gathered
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, weight = ctx.saved_tensors
        gradients = linear_operations.column_backward(
            ctx.plan.backward, grads[0].contiguous(), weight, kept.contiguous(), ctx.gathered
        )
        return *gradients, None, None


class RowParallel(torch.autograd.Function):
    """y = reduce_scatter(x W^T) of x (rows, in / p): a shard of y (rows / p, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: LinearPlan) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        return linear_operations.row_forward(plan.forward, x.contiguous(), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return *linear_operations.row_backward(ctx.plan.backward, grads[0].contiguous(), x, weight), None


class SumGradient(torch.autograd.Function):
    """Identity whose backward pass sums the gradient over the group."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
