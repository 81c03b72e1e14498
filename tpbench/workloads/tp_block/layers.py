"""Tensor- and sequence-parallel layers for any training code: column- and row-parallel linears, and RMSNorm.

    up = ColumnParallelLinear(4096, 14336, group, use_overlap=True)
    down = RowParallelLinear(14336, 4096, group, use_overlap=True)
    y = down(torch.relu(up(x)))  # x, y: this rank's rows of the sequence, (rows / p, ..., 4096)

Activations between the layers are sharded along their first dimension, the sequence, in the order of the group's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpbench.workloads.tp_block import linear_operations
from tpbench.workloads.tp_block.ring import RingSchedule
from tpbench.workloads.tp_block.schedule import LinearPlan, SequentialSchedule
from tpbench.workloads.tp_block.sharded_linear import ShardedLinear


class ColumnParallelLinear(nn.Module):
    """y = all_gather(x) W^T, of which each rank computes its share of the columns.

    Several `out_features`, such as q, k and v, share one gather and one product; each is sharded by itself.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        group: dist.ProcessGroup | None = None,
        *,
        use_overlap: bool = False,
        save_gathered: bool = True,
        seed: int | None = None,
        weight: Tensor | None = None,
        plan: LinearPlan | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`use_overlap`: ring all-gather and reductions in pieces in place of whole collectives (rows then divide by
        p^2). `save_gathered`: keep the gathered x for the backward pass, in place of gathering it again. `weight`: this
        rank's part, in place of a draw from `seed` (0). `plan`: other schedules, in place of `group` and `use_overlap`.
        ValueError where sizes do not divide, or what is in place of another is given beside it."""
        super().__init__()
        parts = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        self.plan, self.save_gathered, self.single = (
            _plan(plan, group, use_overlap),
            save_gathered,
            len(parts) == 1,
        )
        self.linear = ShardedLinear("column", "column", in_features, parts)
        self.local_parts = [each // self.plan.forward.size for each in parts]
        self.weight = _parameter(self.linear, self.plan, weight, seed, device, dtype)

    def forward(self, x: Tensor) -> Any:
        """x (rows / p, ..., in) to y (rows, ..., out / p), or a tuple of these where there are several parts.
        ValueError where the backward pass cannot scatter the rows."""
        shard, schedule = x.reshape(-1, x.shape[-1]), self.plan.backward
        rows = schedule.size * len(shard)
        if rows % schedule.divisor:
            raise ValueError(f"{rows} gathered rows must divide by {schedule.divisor} to overlap in the backward pass")
        product = _Column.apply(shard, self.weight, self.plan, self.save_gathered)
        y = product.view(-1, *x.shape[1:-1], product.shape[-1])
        return y if self.single else y.split(self.local_parts, dim=-1)


class RowParallelLinear(nn.Module):
    """y = reduce_scatter(x W^T): each rank has a share of x's and W's columns, and of y's rows."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: dist.ProcessGroup | None = None,
        *,
        use_overlap: bool = False,
        seed: int | None = None,
        weight: Tensor | None = None,
        plan: LinearPlan | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """As of ColumnParallelLinear."""
        super().__init__()
        self.plan = _plan(plan, group, use_overlap)
        self.linear = ShardedLinear("row", "row", in_features, (out_features,))
        self.weight = _parameter(self.linear, self.plan, weight, seed, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (rows, ..., in / p) to y (rows / p, ..., out). ValueError where the rows do not divide."""
        if x.shape[0] % self.plan.forward.size:
            raise ValueError(f"{x.shape[0]} rows cannot be shared equally by {self.plan.forward.size} ranks")
        shard = _Row.apply(x.reshape(-1, x.shape[-1]), self.weight, self.plan)
        return shard.view(-1, *x.shape[1:-1], shard.shape[-1])


class RMSNorm(nn.Module):
    """x / rms(x) * weight on this rank's rows. The weight is whole on every rank, and so is its gradient: the sum over
    the group (None: the world) of what each rank's rows contribute."""

    def __init__(
        self, weight: Tensor, group: dist.ProcessGroup | None = None, eps: float = 1e-5, *, summed: bool = True
    ) -> None:
        """`summed`: false where nothing is sent, so that the gradient is of the own rows. ValueError with a group."""
        super().__init__()
        if group is not None and not summed:
            raise ValueError("group and summed=False: what is not summed needs no group")
        self.weight, self.group, self.eps = nn.Parameter(weight), group_of(group) if summed else None, eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.group is None else _SumGradient.apply(self.weight, self.group)
        return nn.functional.rms_norm(x, weight.shape, weight, self.eps)


def plan_for(group: dist.ProcessGroup | None, use_overlap: bool) -> LinearPlan:
    """The plain plan of a group (None: of the world), or the one that overlaps by hand."""
    group = group_of(group)
    return LinearPlan.always(RingSchedule(group) if use_overlap else SequentialSchedule(group))


def _plan(plan: LinearPlan | None, group: dist.ProcessGroup | None, use_overlap: bool) -> LinearPlan:
    if plan is None:
        return plan_for(group, use_overlap)
    if use_overlap:
        raise ValueError("use_overlap and plan: a plan says itself what overlaps")
    if group is not None:
        raise ValueError("group and plan: a plan's schedules have a group")
    return plan


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or that of the world. ValueError where there is none."""
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("there is no process group: call torch.distributed.init_process_group first")
    return group


def drawn(linear: ShardedLinear, seed: int, dtype: torch.dtype | None = None) -> Tensor:
    """The full W on the CPU: normal numbers of deviation in_features^-1/2 from one seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(linear.out_features), linear.in_features)
    return (torch.randn(shape, generator=generator) * linear.in_features**-0.5).to(dtype or torch.get_default_dtype())


def _parameter(
    linear: ShardedLinear,
    plan: LinearPlan,
    weight: Tensor | None,
    seed: int | None,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> nn.Parameter:
    rank, size = plan.forward.rank, plan.forward.size
    shape = linear.local_shape(size)
    if weight is None:
        weight = linear.local(drawn(linear, seed or 0, dtype), rank, size)
    elif seed is not None:
        raise ValueError("seed and weight: a weight that is given is not drawn")
    if weight.shape != shape:
        raise ValueError(f"a rank's weight must be {shape}, it is {tuple(weight.shape)}")
    return nn.Parameter(weight.to(device=device, dtype=dtype))


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, weight: Tensor, plan: LinearPlan, save_gathered: bool) -> Tensor:
        gathered, product = linear_operations.column_forward(plan.forward, shard.contiguous(), weight, save_gathered)
        ctx.save_for_backward(gathered if save_gathered else shard, weight)
        ctx.plan, ctx.gathered = plan, save_gathered
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, weight = ctx.saved_tensors
        both = linear_operations.column_backward(
            ctx.plan.backward, grads[0].contiguous(), weight, kept.contiguous(), ctx.gathered
        )
        return *both, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: LinearPlan) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        return linear_operations.row_forward(plan.forward, x.contiguous(), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return *linear_operations.row_backward(ctx.plan.backward, grads[0].contiguous(), x, weight), None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
