"""Tensor- and sequence-parallel layers for any training code, and the transformer block that is built from them.

Activations between the layers are sharded along their first dimension, the sequence, in the order of the group's ranks.

    up = ColumnParallelLinear(4096, 14336, group, use_overlap=True)
    down = RowParallelLinear(14336, 4096, group, use_overlap=True)
    y = down(torch.relu(up(x)))  # x, y: this rank's rows of the sequence, (rows / p, ..., 4096)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tpbench.comm.parallel_linears import (
    Schedule,
    SequentialSchedule,
    column_parallel,
    row_parallel,
    with_summed_gradient,
)
from tpbench.workloads.tp_block.execution.torch_schedules import RingSchedule
from tpbench.workloads.tp_block.problem import ShardedLinear, TpBlock

THETA = 500_000.0
"""Base of the rotary embedding's angles in Llama 3."""


class ParallelLinear(nn.Module):
    """A linear of which each of a group's p ranks holds a part of the weight W."""

    def __init__(
        self,
        linear: ShardedLinear,
        group: dist.ProcessGroup | None = None,
        *,
        use_overlap: bool = False,
        seed: int = 0,
        weight: Tensor | None = None,
        schedule: Schedule | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the layer on one rank. The children take the same arguments.

        Args:
            linear: the sizes of the whole W.
            group: the ranks that share the layer. Default: the world.
            use_overlap: use a ring all-gather and reductions in pieces instead of whole collectives. The rows of y must
                then be divisible by p^2.
            seed: draw the weight from this seed. Equal seeds give the same W at any p.
            weight: this rank's part of W instead of a drawn one: (out / p, in) of a column-parallel layer, (out, in /
                p) of a row-parallel one.
            schedule: of products and collectives, instead of `group` and `use_overlap`.
            device, dtype: those of the weight.

        Raises ValueError if p does not divide a size.
        """
        super().__init__()
        if schedule is None:
            schedule = (RingSchedule if use_overlap else SequentialSchedule)(_group_or_world(group))
        rank, size = schedule.rank, schedule.size
        if weight is None:
            weight = linear.shard(random_weight(linear, seed, dtype), rank, size)
        elif weight.shape != linear.local_shape(size):
            raise ValueError(f"a rank's weight must be {linear.local_shape(size)}, it is {tuple(weight.shape)}")
        self.schedule, self.weight = schedule, nn.Parameter(weight.to(device=device, dtype=dtype))


class ColumnParallelLinear(ParallelLinear):
    """y = all_gather(x) W^T. Each rank computes its share of y's columns.

    Several `out_features`, such as q, k and v, share one gather and one product. Each of them is sharded by itself.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        group: dist.ProcessGroup | None = None,
        *,
        save_gathered: bool = True,
        **options: Any,
    ) -> None:
        """Create the layer.

        Args:
            in_features: columns of the whole W.
            out_features: rows of the whole W, or of each of its parts.
            save_gathered: keep the gathered x for the backward pass. If false, gather x again.
            group, options: those of ParallelLinear.
        """
        parts = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        super().__init__(ShardedLinear("column", "column", in_features, parts), group, **options)
        self.save_gathered = save_gathered
        self.local_parts = [features // self.schedule.size for features in parts]

    def forward(self, x: Tensor) -> Any:
        """Return y (rows, ..., out / p) of x (rows / p, ..., in), or a tuple for several parts."""
        shard = x.reshape(-1, x.shape[-1])
        product = column_parallel(shard, self.weight, self.schedule, save_gathered=self.save_gathered)
        return self.parts(product.view(-1, *x.shape[1:-1], product.shape[-1]))

    def parts(self, y: Tensor) -> Any:
        """Return y, or a tuple of its parts."""
        return y if len(self.local_parts) == 1 else y.split(self.local_parts, dim=-1)


class RowParallelLinear(ParallelLinear):
    """y = reduce_scatter(x W^T). Each rank has a share of the columns of x and W, and of the rows of y."""

    def __init__(
        self, in_features: int, out_features: int, group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        """Create the layer. Further arguments are those of ParallelLinear."""
        super().__init__(ShardedLinear("row", "row", in_features, (out_features,)), group, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return y (rows / p, ..., out) of x (rows, ..., in / p). Raise ValueError if p does not divide the rows."""
        if x.shape[0] % self.schedule.size:
            raise ValueError(f"{x.shape[0]} rows cannot be shared equally by {self.schedule.size} ranks")
        shard = row_parallel(x.reshape(-1, x.shape[-1]), self.weight, self.schedule)
        return shard.view(-1, *x.shape[1:-1], shard.shape[-1])

    def joined(self, x: Tensor, residual: Tensor, norm: RMSNorm, column: ColumnParallelLinear) -> tuple[Tensor, Any]:
        """Return s = residual + this linear of x, and the column-parallel linear of RMSNorm(s), for matrices."""
        weights = self.weight, residual, norm.summed_weight, norm.eps, column.weight
        summed, product = self.schedule.junction(x, *weights, keep=column.save_gathered)
        return summed, column.parts(product)


class RMSNorm(nn.Module):
    """x / rms(x) * weight on this rank's rows.

    The weight is whole on every rank. Its gradient is the sum over the group (default: the world) of the ranks'
    contributions.
    """

    def __init__(
        self, weight: Tensor, group: dist.ProcessGroup | None = None, eps: float = 1e-5, *, summed: bool = True
    ) -> None:
        """Create the layer. With `summed=False` the gradient is that of the own rows only."""
        super().__init__()
        self.weight, self.group, self.eps = nn.Parameter(weight), _group_or_world(group) if summed else None, eps

    @property
    def summed_weight(self) -> Tensor:
        """The weight, whose gradient is summed over the group."""
        return self.weight if self.group is None else with_summed_gradient(self.weight, self.group)

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.summed_weight, self.eps)


def _group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("there is no process group: call torch.distributed.init_process_group first")
    return group


def random_weight(linear: ShardedLinear, seed: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the full W on the CPU: normal numbers of standard deviation in_features^-1/2, from one seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(linear.out_features), linear.in_features)
    return (torch.randn(shape, generator=generator) * linear.in_features**-0.5).to(dtype or torch.get_default_dtype())


def rotary_angles(tokens: int, head_dim: int, device: torch.device) -> Tensor:
    """Return the angles of Llama 3's rotary embedding by position and pair: (tokens, head_dim / 2), float64.

    Number i of the first half of a head and number i of its second half are a point in a plane. The position of the row
    times THETA^(-2 i / head_dim) is the angle by which the point is rotated.
    """
    frequencies = THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    return torch.arange(tokens, dtype=torch.float64, device=device)[:, None] * frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., tokens, head_dim) rotated by angles with these cosines and sines (tokens, head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values on this rank's heads."""

    def __init__(self, qkv: Any, out: Any, head_dim: int, rotation: tuple[Tensor, Tensor] | None = None) -> None:
        """Create the layer. `rotation`: cosines and sines of the rotary embedding, or None without one."""
        super().__init__()
        self.qkv, self.out, self.head_dim, self.rotation = qkv, out, head_dim, rotation

    def between(self, qkv: Sequence[Tensor]) -> Tensor:
        """Return the heads' outputs, (rows, heads * head_dim), of all rows of q, k and v."""
        # (rows, heads * head_dim) as (1, heads, rows, head_dim).
        q, k, v = (columns.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None] for columns in qkv)
        if self.rotation is not None:
            q, k = rotate(q, *self.rotation), rotate(k, *self.rotation)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y[0].transpose(0, 1).flatten(1)


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)) on this rank's columns. x and y: (rows / p, hidden)."""

    def __init__(self, up: Any, down: Any) -> None:
        super().__init__()
        self.up, self.down = up, down

    def between(self, gate_and_up: Sequence[Tensor]) -> Tensor:
        """Return the input of `down`, (rows, ffn / p)."""
        gate, up = gate_and_up
        return functional.silu(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class TransformerBlock(nn.Module):
    """h = x + attention(norm(x)); y = h + mlp(norm(h)). x and y: (rows / p, hidden)."""

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: Mlp) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = attention_norm, attention, mlp_norm, mlp

    def forward(self, x: Tensor, following: Sequence[TransformerBlock] = (), qkv: Any = None) -> Tensor:
        """Return y, or that of the last of the blocks that follow. `qkv`: of x, if the block before has computed it."""
        qkv = self.attention.qkv(self.attention_norm(x)) if qkv is None else qkv
        x, gate_and_up = self.attention.out.joined(self.attention.between(qkv), x, self.mlp_norm, self.mlp.up)
        inner = self.mlp.between(gate_and_up)
        if not following:
            return x + self.mlp.down(inner)
        block, *others = following
        x, qkv = self.mlp.down.joined(inner, x, block.attention_norm, block.attention.qkv)
        return block.forward(x, others, qkv)


class Stack(nn.Sequential):
    """Transformer blocks, one after the other."""

    def forward(self, x: Tensor) -> Any:
        first, *others = self
        return first(x, others)


def build(problem: TpBlock, weights: Mapping[str, Tensor], schedule: Schedule) -> nn.Module:
    """Build the problem's part of a block from this rank's weights, given by the names of the linears and norms.

    The norms' gradients are summed over the schedule's group, if the schedule communicates. With `compile` what lies
    between the linears is compiled. No schedule needs to be: its collectives stay as they are.
    """
    compiler: Any = (
        partial(torch.compile, fullgraph=True, dynamic=False) if problem.compile else lambda function: function
    )

    def layer(linear: ShardedLinear) -> nn.Module:
        given: dict[str, Any] = {"weight": weights[linear.name], "schedule": schedule}
        if linear.kind == "row":
            return RowParallelLinear(linear.in_features, linear.out_features[0], **given)
        given["save_gathered"] = problem.save_gathered
        return ColumnParallelLinear(linear.in_features, linear.out_features, **given)

    layers = {linear.name: layer(linear) for linear in problem.linears}
    if problem.part in ("column", "row"):
        return layers.popitem()[1]
    mlp = Mlp(layers["up"], layers["down"])
    mlp.between = compiler(mlp.between)  # type: ignore[method-assign]
    if problem.part == "mlp":
        return mlp
    norms = [RMSNorm(weights[name], schedule.group, summed=schedule.group is not None) for name in problem.norms]
    rotation = None
    if problem.rotary:
        qkv = weights["qkv"]
        angles = rotary_angles(problem.tokens, problem.head_dim, qkv.device)
        rotation = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
    attention = Attention(layers["qkv"], layers["out"], problem.head_dim, rotation)
    attention.between = compiler(attention.between)  # type: ignore[method-assign]
    schedule.between = compiler(schedule.between)  # type: ignore[method-assign]
    return TransformerBlock(norms[0], attention, norms[1], mlp)


def gradients(problem: TpBlock, module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a built module's weights that have one, by the names of its linears and norms."""
    grads = {}
    for path, parameter in module.named_parameters():
        *owners, _ = path.split(".")
        if parameter.grad is not None:
            grads[owners[-1] if owners else problem.linears[0].name] = parameter.grad
    return grads
