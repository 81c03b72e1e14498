"""Exchange of tokens between tensor-parallel ranks, forward and backward.

Between the matrix products each token is processed alone, so a rank holds only its share of a micro-batch's tokens:
(1, batch * sequence / ranks, width), one sequence after the other. The shares in rank order are the micro-batch as it
lies in memory, for any number of sequences. Shares of every single sequence would need copies to get that order.

If the ranks do not divide the tokens, rows of zeros behind the last token make the shares equal. Nothing reads what
becomes of these rows: gathered tokens are without them, so their gradients are zeros.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)

from tpbench.comm.collectives import gather_rows, scatter_rows


@dataclass(frozen=True)
class TokenExchange:
    """All-gather and reduce-scatter of a micro-batch's tokens over the ranks of a group.

    A share is (1, share of the tokens, width): batch * sequence / ranks, rounded up.
    """

    group: dist.ProcessGroup
    batch_size: int
    seq_length: int

    @property
    def padding(self) -> int:
        """Rows of zeros behind the last token."""
        return -self.batch_size * self.seq_length % self.group.size()

    def _without_padding(self, rows: Tensor) -> Tensor:
        """Return gathered rows as (batch, sequence, width)."""
        tokens = rows[: self.batch_size * self.seq_length] if self.padding else rows
        return tokens.view(self.batch_size, self.seq_length, rows.shape[-1])

    def _with_padding(self, whole: Tensor) -> Tensor:
        """Return (batch, sequence, width) as rows that the ranks divide."""
        rows = whole.flatten(0, 1)
        return F.pad(rows, (0, 0, 0, self.padding)) if self.padding else rows

    def gather(self, share: Tensor) -> Tensor:
        """All-gather shares to all sequences, (batch, sequence, width).

        Backward, gradients are summed over the ranks and scattered.
        """
        rows = share.flatten(0, 1)
        gathered: Tensor
        if torch.compiler.is_compiling():
            gathered = all_gather_tensor_autograd(rows, 0, self.group)
        else:
            gathered = _Gather.apply(rows, self.group)
        return self._without_padding(gathered)

    def scatter(self, partial: Tensor) -> Tensor:
        """Sum (batch, sequence, width) over the ranks, and return this rank's share. Backward, gradients are
        all-gathered."""
        rows = self._with_padding(partial)
        share: Tensor
        if torch.compiler.is_compiling():
            share = reduce_scatter_tensor_autograd(rows, "sum", 0, self.group)
        else:
            share = _Scatter.apply(rows, self.group)
        return share[None]

    def gather_copies(self, share: Tensor) -> Tensor:
        """Gather as `gather` for a computation that every rank repeats. Backward, a rank keeps its share of a gradient
        that every rank has."""
        gathered: Tensor = _GatherCopies.apply(share.flatten(0, 1), self.group)
        return self._without_padding(gathered)

    def keep_share(self, whole: Tensor) -> Tensor:
        """Return this rank's share of a tensor that every rank has computed, (batch, sequence, width). Backward,
        gradients are all-gathered."""
        share: Tensor = _KeepShare.apply(self._with_padding(whole), self.group)
        return share[None]


def exchange_tokens(block: nn.Module, tokens: TokenExchange, *, replicated: bool) -> None:
    """Let a block that is called with a rank's share of the tokens compute with all tokens. The share is its first
    argument, by position or by keyword.

    A replicated block computes the same on every rank, and returns the rank's share of it.
    """
    first = next(iter(inspect.signature(block.forward).parameters))
    gather = tokens.gather_copies if replicated else tokens.gather

    def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if inputs:
            return (gather(inputs[0]), *inputs[1:]), named
        return inputs, {**named, first: gather(named[first])}

    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # attention returns its weights too
            return (tokens.keep_share(output[0]), *output[1:])
        return tokens.keep_share(output)

    block.register_forward_pre_hook(before, with_kwargs=True)
    if replicated:
        block.register_forward_hook(after)


class _GatherCopies(torch.autograd.Function):
    """Gather rows for a computation that every rank repeats. Backward, keep this rank's rows."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_gather(share.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return keep_rows(gradient, ctx.group), None


class _KeepShare(torch.autograd.Function):
    """Keep this rank's rows of a tensor that every rank has. Backward, gather the rows."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return keep_rows(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_gather(gradient.contiguous(), ctx.group), None


class GatherColumns(torch.autograd.Function):
    """All-gather column shards, (..., columns / ranks), to (..., columns), of which every rank computes the same.

    Backward, a rank keeps its columns of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather_columns(shard, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return keep_columns(gradient, ctx.group), None


class KeepColumns(torch.autograd.Function):
    """Keep this rank's columns of a tensor that every rank has, (..., columns). Backward, all-gather the gradients."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return keep_columns(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gather_columns(gradient, ctx.group), None


def keep_rows(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's share of the first dimension."""
    return whole.chunk(group.size())[group.rank()].contiguous()


def keep_columns(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's share of the last dimension."""
    return whole.chunk(group.size(), -1)[group.rank()].contiguous()


def gather_columns(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather the last dimension."""
    rows = _all_gather(shard.movedim(-1, 0).flatten(1).contiguous(), group)
    return rows.view(-1, *shard.shape[:-1]).movedim(0, -1)


def _all_gather(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    if not torch.compiler.is_compiling():
        return gather_rows(rows, group)
    gathered: Tensor = all_gather_tensor(rows, 0, group)
    return gathered


class _Gather(torch.autograd.Function):
    """Gather rows. Backward, sum them over the ranks and scatter."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather_rows(share, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return scatter_rows(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    """Sum rows over the ranks and scatter. Backward, gather."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return scatter_rows(partial, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gather_rows(gradient, ctx.group), None
