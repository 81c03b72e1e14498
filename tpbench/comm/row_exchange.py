"""Differentiable exchanges of rows and columns between the ranks of a group, for layers with sequence parallelism.

Between matrix products each token is processed alone, so a rank holds only its share of a micro-batch's tokens: (1,
batch * sequence / ranks, width), one sequence after the other. The shares in rank order are the micro-batch as it lies
in memory, for any number of sequences. Shares of every single sequence would need copies to get that order.

If the ranks do not divide the tokens, rows of zeros behind the last token make the shares equal. Nothing reads what
becomes of these rows: gathered tokens are without them, so their gradients are zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpbench.comm.collectives import exchanged, gather_rows, scatter_rows


@dataclass(frozen=True)
class TokenExchange:
    """All-gather and reduce-scatter of a micro-batch's tokens over the ranks of a group.

    A share is (1, share of the tokens, width): batch * sequence / ranks, rounded up.
    """

    group: dist.ProcessGroup
    batch_size: int
    seq_length: int

    def gather(self, share: Tensor) -> Tensor:
        """All-gather shares to all sequences, (batch, sequence, width).

        Backward, gradients are summed over the ranks and scattered.
        """
        return self._whole(exchanged(share.flatten(0, 1), self.group, gather_rows, scatter_rows))

    def scatter(self, partial: Tensor) -> Tensor:
        """Sum (batch, sequence, width) over the ranks, and return this rank's share. Backward, gradients are
        all-gathered."""
        return exchanged(self._rows(partial), self.group, scatter_rows, gather_rows)[None]

    @property
    def _padding(self) -> int:
        return -self.batch_size * self.seq_length % self.group.size()

    def _whole(self, rows: Tensor) -> Tensor:
        """Return gathered rows, without those of the padding, as (batch, sequence, width)."""
        tokens = rows[: self.batch_size * self.seq_length] if self._padding else rows
        return tokens.view(self.batch_size, self.seq_length, rows.shape[-1])

    def _rows(self, whole: Tensor) -> Tensor:
        """Return (batch, sequence, width) as rows that the ranks divide."""
        rows = whole.flatten(0, 1)
        return F.pad(rows, (0, 0, 0, self._padding)) if self._padding else rows


def gather_columns(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather column shards, (..., columns / ranks), to (..., columns), of which every rank computes the same.

    Backward, a rank keeps its columns of the gradient.
    """
    return exchanged(shard, group, _gather_columns, _keep_columns)


def keep_columns(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's columns of a tensor that every rank has, (..., columns). Backward, all-gather the
    gradients."""
    return exchanged(whole, group, _keep_columns, _gather_columns)


def gather_before(block: nn.Module, gather: Callable[[Tensor], Any]) -> None:
    """Let a block that is called with a rank's share of the tokens compute with all tokens. The share is its first
    argument, by position or by keyword."""
    first = next(iter(inspect.signature(block.forward).parameters))

    def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if inputs:
            return (gather(inputs[0]), *inputs[1:]), named
        return inputs, {**named, first: gather(named[first])}

    block.register_forward_pre_hook(before, with_kwargs=True)


def _keep_columns(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(group.size(), -1)[group.rank()].contiguous()


def _gather_columns(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows = gather_rows(shard.movedim(-1, 0).flatten(1).contiguous(), group)
    return rows.view(-1, *shard.shape[:-1]).movedim(0, -1)
