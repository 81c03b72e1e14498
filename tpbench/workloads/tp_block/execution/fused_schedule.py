"""The step from a row-parallel to the next column-parallel linear as one kernel, through the memory of peers.

The first product is written to symmetric memory. Behind a barrier on the stream, one kernel sums, normalises and
gathers (`junction`), and behind a second barrier the next product reads the result where it lies. The backward pass is
the mirror, beside the product for the gradient of the column-parallel weight. The first gather and the last scatter of
a block or a stack are copies to peers, and a sum of what they hold.

Buffers alternate by name. A rank writes to one again after a barrier of the use in between, which a peer reaches only
when it has read the buffer. Rows for peers in a junction are written behind a barrier of the same junction.
`tpbench/docs/tp_block.md` says what was tried.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tpbench.comm.parallel_linears import Pending
from tpbench.workloads.tp_block.execution.copy_engine import CopyEngineSchedule
from tpbench.workloads.tp_block.execution.junction import join_rows


class FusedSchedule(CopyEngineSchedule):
    """Junctions are one kernel between two barriers, other operations copies or sums beside one barrier."""

    def gather(self, shard: Tensor) -> Pending:
        places, whole = self.places(shard, "gathered")
        for place in places:
            place.copy_(shard)
        self.buffers.barrier()
        return lambda: whole

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Pending, Tensor]:
        whole = self.gather(shard)()
        return lambda: whole.clone() if keep else whole, whole @ matrix

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        total, *others = self.parts(whole, matrix)
        self.buffers.barrier()
        for part in others:
            total = total + part
        return lambda: total

    def junction(
        self, x: Tensor, row: Tensor, residual: Tensor, norm: Tensor, eps: float, column: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        return _Junction.apply(self, x, row, residual, norm, eps, column, keep)  # type: ignore[no-any-return]

    def parts(self, x: Tensor, matrix: Tensor) -> list[Tensor]:
        """Multiply into symmetric memory. Return this rank's rows of each rank's product, valid behind a barrier."""
        products = self._buffer("products", (len(x), matrix.shape[1]), x.dtype)
        torch.mm(x, matrix, out=products[self.rank])
        return [product.chunk(self.size)[self.rank] for product in products]

    def places(self, shard: Tensor, name: str) -> tuple[list[Tensor], Tensor]:
        """Return places for this rank's rows in the gathered tensor of each rank, the next rank first, and its own."""
        gathered = self._buffer(name, (self.size * len(shard), shard.shape[1]), shard.dtype)
        return [gathered[rank].chunk(self.size)[self.rank] for rank in (*self.peers, self.rank)], gathered[self.rank]


class _Junction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, schedule: FusedSchedule, x: Tensor, row: Tensor, residual: Tensor, norm: Tensor, eps: float,
        column: Tensor, keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, residual = x.contiguous(), residual.contiguous()
        parts, (places, whole) = schedule.parts(x, row.t()), schedule.places(residual, "joined")
        schedule.buffers.barrier()
        summed, _ = join_rows(parts, places, residual, norm, eps)
        schedule.buffers.barrier()
        ctx.save_for_backward(x, row, summed, norm, column, *([whole.clone()] if keep else []))
        ctx.schedule, ctx.eps = schedule, eps
        return summed, whole @ column.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        schedule: FusedSchedule = ctx.schedule
        x, row, summed, norm, column, *kept = ctx.saved_tensors
        upstream, grad = (gradient.contiguous() for gradient in grads)
        # Without a kept tensor, normalise and gather again.
        whole = kept[0] if kept else schedule.gather(functional.rms_norm(summed, norm.shape, norm, ctx.eps))()
        parts, (places, grad_y) = schedule.parts(grad, column), schedule.places(summed, "joined")
        schedule.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(schedule.copies):
            schedule.buffers.barrier()
            grad_summed, grad_norm = join_rows(parts, places, summed, norm, ctx.eps, upstream)
            schedule.buffers.barrier()
        grad_column = grad.t() @ whole
        torch.cuda.current_stream().wait_stream(schedule.copies)
        return None, grad_y @ row, grad_y.t() @ x, grad_summed, grad_norm, None, grad_column, None
