"""Modules of a decoder under tensor parallelism: parameters are DTensors, the computation uses their local shards.

DTensor's dispatcher costs the host about 50 us for each operation, ten times the launch of the operation itself. A
layer that computes on DTensors is limited by the host long before the GPU is busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tpbench.workloads.train_step.model.norms import FusedNorm, normalise
from tpbench.workloads.train_step.sharding.key_value_heads import HeadShare
from tpbench.workloads.train_step.sharding.sequence_parallel import GatherColumns, KeepColumns, TokenExchange
from tpbench.workloads.uneven_shards import sharded_along


class ShardedModule(nn.Module):
    """A module whose parameters are DTensors and whose forward pass computes with `local_parameters`.

    `compute_locally` sets `local_parameters` before each forward pass. It does so outside of compiled or checkpointed
    code, which would keep a reference to the DTensor's mesh.
    """

    local_parameters: tuple[Tensor, ...]
    partial_gradient = False
    """True if every rank has all parameters, but only its share of their gradients."""


class ColumnLinear(ShardedModule):
    """A linear layer of which each rank computes a shard of the output's columns.

    With `gather_output` each rank gathers all columns, and every rank must compute the same with them.
    """

    def __init__(self, linear: nn.Linear, tp: DeviceMesh, *, gather_output: bool = False) -> None:
        super().__init__()
        self.weight = _sharded(linear.weight, tp, 0)
        self.bias = None if linear.bias is None else _sharded(linear.bias, tp, 0)
        self.gathering_group = tp.get_group() if gather_output else None

    def forward(self, hidden: Tensor) -> Tensor:
        columns = F.linear(hidden, *self.local_parameters)
        if self.gathering_group is None:
            return columns
        gathered: Tensor = GatherColumns.apply(columns, self.gathering_group)
        return gathered


class RepeatedHeadsLinear(ShardedModule):
    """A linear layer of keys or values, whose heads several ranks repeat because there are too few for all ranks.

    Each rank has the whole weight, computes the heads that its queries use, and has a share of the weight's gradient.
    """

    partial_gradient = True

    def __init__(self, linear: nn.Linear, tp: DeviceMesh, share: HeadShare, head_dim: int) -> None:
        super().__init__()
        self.weight = _replicated(linear.weight, tp)
        self.bias = None if linear.bias is None else _replicated(linear.bias, tp)
        self.rows = slice(share.computed.start * head_dim, share.computed.stop * head_dim)
        self.head_dim = head_dim
        heads = [head - share.computed.start for head in share.key_values]
        self.heads = None if len(heads) == len(share.computed) else heads

    def forward(self, hidden: Tensor) -> Tensor:
        columns = F.linear(hidden, *(each[self.rows] for each in self.local_parameters))
        if self.heads is None:
            return columns
        heads = columns.unflatten(-1, (-1, self.head_dim))
        return torch.stack([heads[..., head, :] for head in self.heads], -2).flatten(-2)


class RowLinear(ShardedModule):
    """A linear layer of which each rank has a shard of the input's columns. The outputs are summed over the ranks, and
    each rank keeps its share of the tokens.

    With `split_input` each rank takes its columns of an input that it has whole.
    """

    def __init__(self, linear: nn.Linear, tp: DeviceMesh, tokens: TokenExchange, *, split_input: bool = False) -> None:
        super().__init__()
        self.weight = _sharded(linear.weight, tp, 1)
        self.bias = None if linear.bias is None else _replicated(linear.bias, tp)
        self.tokens, self.split_input = tokens, split_input

    def forward(self, hidden: Tensor) -> Tensor:
        weight, *bias = self.local_parameters
        if self.split_input:
            hidden = KeepColumns.apply(hidden, self.tokens.group)
        summed = self.tokens.scatter(F.linear(hidden, weight))
        return summed + bias[0] if bias else summed


class ReplicatedLinear(ShardedModule):
    """A linear layer that every rank computes whole, with all tokens."""

    def __init__(self, linear: nn.Linear, tp: DeviceMesh) -> None:
        super().__init__()
        self.weight = _replicated(linear.weight, tp)
        self.bias = None if linear.bias is None else _replicated(linear.bias, tp)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, *self.local_parameters)


class ShardedEmbedding(ShardedModule):
    """An embedding of which each rank has a shard of the vocabulary's rows. The outputs are summed over the ranks, and
    each rank keeps its share of the tokens."""

    def __init__(self, embedding: nn.Embedding, tp: DeviceMesh, tokens: TokenExchange) -> None:
        super().__init__()
        self.weight = _sharded(embedding.weight, tp, 0)
        self.first_row = tp.get_local_rank() * -(-embedding.num_embeddings // tp.size())
        self.padding_idx = None if embedding.padding_idx is None else embedding.padding_idx - self.first_row
        self.tokens = tokens
        self.scale: float | None = getattr(embedding, "scalar_embed_scale", None)
        """Gemma multiplies the vectors by it, rounded to the weight's dtype."""

    def forward(self, ids: Tensor) -> Tensor:
        (weight,) = self.local_parameters
        rows = ids - self.first_row
        elsewhere = (rows < 0) | (rows >= len(weight))
        padding = self.padding_idx if self.padding_idx is not None and 0 <= self.padding_idx < len(weight) else None
        vectors = F.embedding(rows.masked_fill(elsewhere, 0), weight, padding)
        if self.scale is not None:
            vectors = vectors * torch.tensor(self.scale, dtype=weight.dtype, device=weight.device)
        return self.tokens.scatter(vectors.masked_fill(elsewhere[..., None], 0.0))


class ShardedHead(ColumnLinear):
    """The head, of which each rank gathers the tokens and computes the logits of its vocabulary shard, (batch,
    sequence, vocabulary / ranks).

    With `as_dtensor` the shards become one DTensor; with `whole` each rank gathers all logits.
    """

    def __init__(
        self, linear: nn.Linear, tp: DeviceMesh, tokens: TokenExchange, *, whole: bool, as_dtensor: bool
    ) -> None:
        super().__init__(linear, tp)
        self.tp, self.vocab, self.tokens, self.whole, self.as_dtensor = (
            tp,
            linear.out_features,
            tokens,
            whole,
            as_dtensor,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.tokens.gather(hidden)
        logits = super().forward(hidden)
        if not (self.whole or self.as_dtensor):
            return logits
        sharded = sharded_along(2, self.vocab, logits, self.tp)
        return sharded.redistribute(placements=[Replicate()]).to_local() if self.whole else sharded


class ReplicatedNorm(ShardedModule):
    """A norm with replicated parameters, applied to this rank's share of the tokens or of the heads.

    A rank that has the whole input has the whole gradient, too: `partial_gradient` is then false.
    """

    def __init__(self, norm: FusedNorm, tp: DeviceMesh, *, partial_gradient: bool = True) -> None:
        super().__init__()
        self.weight = _replicated(norm.weight, tp)
        self.bias = None if norm.bias is None else _replicated(norm.bias, tp)
        self.kind, self.weight_offset, self.partial_gradient = norm.kind, norm.weight_offset, partial_gradient

    def forward(self, hidden: Tensor) -> Tensor:
        weight, *bias = self.local_parameters
        return normalise(hidden, weight, bias[0] if bias else None, self.kind)


class ReplicatedActivation(ShardedModule):
    """An activation with learned numbers, such as Apertus's, applied to this rank's columns."""

    def __init__(self, activation: nn.Module, tp: DeviceMesh, *, partial_gradient: bool) -> None:
        super().__init__()
        for name, parameter in activation.named_parameters():
            self.register_parameter(name, _replicated(parameter, tp))
        self.activation = (activation,)  # in a tuple, so that its parameters are not the model's
        self.partial_gradient = partial_gradient

    def forward(self, hidden: Tensor) -> Tensor:
        names = (name for name, _ in self.named_parameters())
        numbers = dict(zip(names, self.local_parameters, strict=True))
        activated: Tensor = torch.func.functional_call(self.activation[0], numbers, (hidden,))
        return activated


def compute_locally(part: nn.Module) -> None:
    """Set `local_parameters` of all sharded modules in `part` before each of its forward passes.

    A rank's gradient of a replicated parameter is then only its share, until `sum_replicated_gradients`.
    """
    modules = [module for module in part.modules() if isinstance(module, ShardedModule)]

    def set_local_parameters(*_: Any) -> None:
        parameters = [list(module.parameters()) for module in modules]
        shards = iter(_LocalShards.apply(*(parameter for owned in parameters for parameter in owned)))
        for module, owned in zip(modules, parameters, strict=True):
            module.local_parameters = tuple(next(shards) for _ in owned)

    part.register_forward_pre_hook(set_local_parameters)


def replicated_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters that every rank has whole, but only its share of their gradients: those of norms,
    activations and repeated heads, and biases of row-parallel layers."""
    partial = [module for module in model.modules() if isinstance(module, ShardedModule) and module.partial_gradient]
    biases = [module.bias for module in model.modules() if isinstance(module, RowLinear) and module.bias is not None]
    return [*(parameter for module in partial for parameter in module.parameters()), *biases]


@torch.no_grad()
def sum_replicated_gradients(parameters: Sequence[Tensor], group: Any) -> None:
    """Replace each rank's share of these gradients by the sum over the ranks, with one all-reduce in fp32."""
    shares = [parameter.grad.to_local() for parameter in parameters if isinstance(parameter.grad, DTensor)]
    if not shares:  # OLMo's norms have no weights
        return
    flat = torch.cat([share.flatten().float() for share in shares])
    dist.all_reduce(flat, group=group)
    sums = flat.split([share.numel() for share in shares])
    torch._foreach_copy_(shares, [flat_sum.view_as(share) for flat_sum, share in zip(sums, shares, strict=True)])


class _LocalShards(torch.autograd.Function):
    """`to_local` of many DTensors at once. The backward pass of `to_local` itself costs the host 100 us per tensor.
    Here gradients have the layout of their parameters, so there is nothing to derive."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.layouts = [parameter._spec for parameter in parameters]
        return tuple(parameter._local_tensor.view_as(parameter._local_tensor) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(
            DTensor(gradient, layout, requires_grad=False)
            for gradient, layout in zip(gradients, ctx.layouts, strict=True)
        )


def _sharded(parameter: Tensor, tp: DeviceMesh, dimension: int) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(parameter.detach(), tp, [Shard(dimension)], src_data_rank=None))


def _replicated(parameter: Tensor, tp: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(parameter.detach(), tp, [Replicate()], src_data_rank=None))
