"""Exchange of tokens between tensor-parallel ranks, forward and backward.

Between the matrix products each token is processed alone, so a rank holds only its share of a micro-batch's tokens:
(1, batch * sequence / ranks, width), one sequence after the other. The shares in rank order are the micro-batch as it
lies in memory, for any number of sequences. Shares of every single sequence would need copies to get that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd

from tpbench.comm.collectives import gather_rows, scatter_rows


@dataclass(frozen=True)
class TokenExchange:
    """All-gather and reduce-scatter of a micro-batch's tokens over the ranks of a group."""

    group: dist.ProcessGroup
    seq_length: int

    def gather(self, share: Tensor) -> Tensor:
        """All-gather shares, (1, batch * sequence / ranks, width), to all sequences, (batch, sequence, width).

        Backward, gradients are summed over the ranks and scattered.
        """
        rows = share.flatten(0, 1)
        gathered: Tensor
        if torch.compiler.is_compiling():
            gathered = all_gather_tensor_autograd(rows, 0, self.group)
        else:
            gathered = _Gather.apply(rows, self.group)
        return gathered.view(-1, self.seq_length, share.shape[-1])

    def scatter(self, partial: Tensor) -> Tensor:
        """Sum (batch, sequence, width) over the ranks, and return this rank's share, (1, batch * sequence / ranks,
        width). Backward, gradients are all-gathered."""
        rows = partial.flatten(0, 1)
        share: Tensor
        if torch.compiler.is_compiling():
            share = reduce_scatter_tensor_autograd(rows, "sum", 0, self.group)
        else:
            share = _Scatter.apply(rows, self.group)
        return share[None]


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
    def forward(ctx: Any, partial: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return scatter_rows(partial, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gather_rows(gradient, ctx.group), None
