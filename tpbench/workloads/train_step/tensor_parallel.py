"""A decoder's parts under tensor parallelism: parameters are DTensors, what is computed with them are plain tensors.

DTensor's dispatcher costs the host some 50 us for each operation, ten times the operation's own launch: a layer that
computes on DTensors waits for the host long before the GPU is busy.

Between the products, where each token is by itself, a rank holds its share of the micro-batch's tokens, one sequence
after the other: (1, batch * sequence / ranks, width). Shares of ranks in a row are the micro-batch as it lies in
memory, of however many sequences; shards of each sequence would have to be copied into that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tpbench.comm.collectives import gather_rows, scatter_rows
from tpbench.workloads.train_step.models import rms_norm


@dataclass(frozen=True)
class Tokens:
    """How the tokens of a micro-batch are shared out over the ranks of a group."""

    group: dist.ProcessGroup
    seq_length: int

    def gather(self, share: Tensor) -> Tensor:
        """All sequences, (batch, sequence, width), from each rank's share, (1, batch * sequence / ranks, width).
        Gradients are summed over the ranks and scattered."""
        rows = share.flatten(0, 1)
        whole: Tensor
        if torch.compiler.is_compiling():
            whole = all_gather_tensor_autograd(rows, 0, self.group)
        else:
            whole = _Gather.apply(rows, self.group)
        return whole.view(-1, self.seq_length, share.shape[-1])

    def scatter(self, whole: Tensor) -> Tensor:
        """This rank's share, (1, batch * sequence / ranks, width), of the sum over ranks of (batch, sequence, width).
        Gradients are gathered."""
        rows = whole.flatten(0, 1)
        share: Tensor
        if torch.compiler.is_compiling():
            share = reduce_scatter_tensor_autograd(rows, "sum", 0, self.group)
        else:
            share = _Scatter.apply(rows, self.group)
        return share[None]


class Sharded(nn.Module):
    """Holds DTensors; its forward pass computes with `here`, what this rank has of them, which `compute_locally` puts
    there: outside of what is compiled or computed again, where a DTensor would take its mesh along."""

    here: tuple[Tensor, ...]


class ColumnLinear(Sharded):
    """Each rank computes a shard of the output's columns."""

    def __init__(self, linear: nn.Linear, tp: DeviceMesh) -> None:
        super().__init__()
        self.weight = _sharded(linear.weight, tp, 0)
        self.bias = None if linear.bias is None else _sharded(linear.bias, tp, 0)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, *self.here)


class RowLinear(Sharded):
    """Each rank has a shard of the input's columns; the sum over ranks leaves each its share of the tokens."""

    def __init__(self, linear: nn.Linear, tp: DeviceMesh, tokens: Tokens) -> None:
        super().__init__()
        self.weight = _sharded(linear.weight, tp, 1)
        self.bias = None if linear.bias is None else _replicated(linear.bias, tp)
        self.tokens = tokens

    def forward(self, hidden: Tensor) -> Tensor:
        weight, *bias = self.here
        summed = self.tokens.scatter(F.linear(hidden, weight))
        return summed + bias[0] if bias else summed


class ShardedEmbedding(Sharded):
    """Each rank has a shard of the vocabulary's rows; the sum over ranks leaves each its share of the tokens."""

    def __init__(self, embedding: nn.Embedding, tp: DeviceMesh, tokens: Tokens) -> None:
        super().__init__()
        self.weight = _sharded(embedding.weight, tp, 0)
        self.first = tp.get_local_rank() * -(-embedding.num_embeddings // tp.size())
        self.padding_idx = None if embedding.padding_idx is None else embedding.padding_idx - self.first
        self.tokens = tokens

    def forward(self, ids: Tensor) -> Tensor:
        (weight,) = self.here
        rows = ids - self.first
        elsewhere = (rows < 0) | (rows >= len(weight))
        padding = self.padding_idx if self.padding_idx is not None and 0 <= self.padding_idx < len(weight) else None
        found = F.embedding(rows.masked_fill(elsewhere, 0), weight, padding)
        return self.tokens.scatter(found.masked_fill(elsewhere[..., None], 0.0))


class ShardedHead(ColumnLinear):
    """Logits of a shard of the vocabulary: as they are, or of the whole vocabulary as a DTensor, sharded or not."""

    def __init__(self, linear: nn.Linear, tp: DeviceMesh, *, whole: bool, as_dtensor: bool) -> None:
        super().__init__(linear, tp)
        self.tp, self.vocab, self.whole, self.as_dtensor = tp, linear.out_features, whole, as_dtensor

    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden)
        if not (self.whole or self.as_dtensor):
            return logits
        shape = torch.Size((*hidden.shape[:-1], self.vocab))
        stride = (shape[1] * self.vocab, self.vocab, 1)
        sharded = DTensor.from_local(logits, self.tp, [Shard(2)], run_check=False, shape=shape, stride=stride)
        return sharded.redistribute(placements=[Replicate()]).to_local() if self.whole else sharded


class ShardNorm(Sharded):
    """RMS norm of what is here, a share of the tokens or of the heads; of `tokens` then all, as the products behind it
    need them."""

    def __init__(self, norm: Any, tp: DeviceMesh, tokens: Tokens | None = None) -> None:
        super().__init__()
        self.weight = _replicated(norm.weight, tp)
        self.epsilon: float = norm.variance_epsilon
        self.tokens = tokens

    def forward(self, hidden: Tensor) -> Tensor:
        (weight,) = self.here
        normed = rms_norm(hidden, weight, self.epsilon)
        return normed if self.tokens is None else self.tokens.gather(normed)


def compute_locally(part: nn.Module) -> None:
    """Before each forward pass of a part of the model, hand the modules in it their shards. The gradient of a parameter
    that every rank has whole is this rank's share, until `sum_gradients`."""
    inside = [each for each in part.modules() if isinstance(each, Sharded)]

    def hand_out(*_: Any) -> None:
        owners = [list(each.parameters()) for each in inside]
        shards = iter(_Shards.apply(*(parameter for owned in owners for parameter in owned)))
        for each, owned in zip(inside, owners, strict=True):
            each.here = tuple(next(shards) for _ in owned)

    part.register_forward_pre_hook(hand_out)


def replicated(module: nn.Module) -> list[Tensor]:
    """The parameters below it that each rank has whole, for `sum_gradients`."""
    kinds = [each for each in module.modules() if isinstance(each, (ShardNorm, RowLinear))]
    found = [each.weight if isinstance(each, ShardNorm) else each.bias for each in kinds]
    return [each for each in found if each is not None]


@torch.no_grad()
def sum_gradients(parameters: Sequence[Tensor], group: Any) -> None:
    """Each rank's share of these gradients becomes their sum, by one collective in fp32."""
    shares = [each.grad.to_local() for each in parameters if isinstance(each.grad, DTensor)]
    together = torch.cat([each.flatten().float() for each in shares])
    dist.all_reduce(together, group=group)
    summed = together.split([each.numel() for each in shares])
    torch._foreach_copy_(shares, [each.view_as(share) for each, share in zip(summed, shares, strict=True)])


class _Shards(torch.autograd.Function):
    """`to_local` of many: its backward pass takes the host 100 us for each, though gradients are laid out as parameters
    are and nothing has to be worked out."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.layouts = [each._spec for each in parameters]
        return tuple(each._local_tensor.view_as(each._local_tensor) for each in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(
            DTensor(gradient, layout, requires_grad=False)
            for gradient, layout in zip(gradients, ctx.layouts, strict=True)
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather_rows(share, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return scatter_rows(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return scatter_rows(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gather_rows(gradient, ctx.group), None


def _sharded(parameter: Tensor, tp: DeviceMesh, dimension: int) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(parameter.detach(), tp, [Shard(dimension)], src_data_rank=None))


def _replicated(parameter: Tensor, tp: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(parameter.detach(), tp, [Replicate()], src_data_rank=None))
