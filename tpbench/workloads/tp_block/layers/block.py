"""The transformer block and its parts, built from tensor-parallel layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional

from tpbench.comm.parallel_linears import LinearPlan
from tpbench.workloads.tp_block.layers import rotary
from tpbench.workloads.tp_block.layers.parallel import ColumnParallelLinear, RMSNorm, RowParallelLinear
from tpbench.workloads.tp_block.layers.sharded_linear import ShardedLinear
from tpbench.workloads.tp_block.problem import TpBlock

Planner = Callable[[ShardedLinear], LinearPlan]
"""Returns the schedules of a linear."""


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values on this rank's heads. x and y: (rows / p, hidden)."""

    def __init__(
        self, qkv: nn.Module, out: nn.Module, head_dim: int, rotation: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Create the layer. `rotation`: cosines and sines of the rotary embedding, or None without one."""
        super().__init__()
        self.qkv, self.out, self.head_dim, self.rotation = qkv, out, head_dim, rotation

    def forward(self, x: Tensor) -> Tensor:
        # (rows, heads * head_dim) as (1, heads, rows, head_dim).
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None] for each in self.qkv(x))
        if self.rotation is not None:
            q, k = rotary.rotate(q, *self.rotation), rotary.rotate(k, *self.rotation)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y[0].transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)) on this rank's columns. x and y: (rows / p, hidden)."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x)
        return self.down(functional.silu(gate) * up)


class TransformerBlock(nn.Module):
    """h = x + attention(norm(x)); y = h + mlp(norm(h)). x and y: (rows / p, hidden)."""

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: Mlp) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = attention_norm, attention, mlp_norm, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def build(problem: TpBlock, weights: Mapping[str, Tensor], plan: Planner) -> nn.Module:
    """Build the problem's part of a block from this rank's weights, given by the names of the linears and norms.

    The norms' gradients are summed over the group of the first linear's schedule, if that schedule communicates.
    """

    def layer(linear: ShardedLinear) -> nn.Module:
        weight, schedules = weights[linear.name], plan(linear)
        if linear.kind == "row":
            return RowParallelLinear(linear.in_features, linear.out_features[0], weight=weight, plan=schedules)
        keep = problem.save_gathered
        return ColumnParallelLinear(
            linear.in_features, linear.out_features, save_gathered=keep, weight=weight, plan=schedules
        )

    layers = {linear.name: layer(linear) for linear in problem.linears}
    if problem.part in ("column", "row"):
        return layers.popitem()[1]
    mlp = Mlp(layers["up"], layers["down"])
    if problem.part == "mlp":
        return mlp
    group = plan(problem.linears[0]).forward.group
    norms = [RMSNorm(weights[name], group, summed=group is not None) for name in problem.norms]
    attention = Attention(layers["qkv"], layers["out"], problem.head_dim, _rotation(problem, weights["qkv"]))
    return TransformerBlock(norms[0], attention, norms[1], mlp)


def _rotation(problem: TpBlock, weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """The cosines and sines of the problem's rotary embedding in a weight's dtype, if it has one."""
    if not problem.rotary:
        return None
    angles = rotary.angles(problem.tokens, problem.head_dim, weight.device)
    return angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)


def gradients(problem: TpBlock, module: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of a built module's weights, by the names of its linears and norms."""
    grads = {}
    for path, parameter in module.named_parameters():
        *owners, _ = path.split(".")
        grads[owners[-1] if owners else problem.linears[0].name] = parameter.grad
    return grads
