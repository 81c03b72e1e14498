"""The step from a row-parallel to the next column-parallel linear as one kernel, through the memory of peers.

Four operations lie between the two products: reduce-scatter, residual, RMSNorm and all-gather. Here the first product
is written to symmetric memory. Behind a barrier on the stream, one kernel sums, normalises and gathers this rank's rows
(`tpbench.kernels.junction`), and behind a second barrier the next product reads the result where it lies. The backward
pass is the mirror. The kernel then runs beside the product for the gradient of the column-parallel weight.

The first all-gather and the last reduce-scatter of a block or a stack have no counterpart: they are the copy engine's.

Buffers. A rank writes to a buffer before the first barrier (its product) or between both (rows for peers). What peers
read in the junction before, they have read before they reach these barriers. No signal or epoch is needed, and a
replayed graph is as safe as eager work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tpbench.kernels.junction import join_gradients, join_rows
from tpbench.workloads.tp_block.execution.copy_engine import CopyEngineSchedule


class FusedSchedule(CopyEngineSchedule):
    """Junctions are one kernel. All other operations are those of the copy engine's schedule."""

    def junction(
        self, x: Tensor, row: Tensor, residual: Tensor, norm: Tensor, eps: float, column: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        summed, product = _Junction.apply(self, x, row, residual, norm, eps, column, keep)
        return summed, product

    def partial_product(self, x: Tensor, matrix: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Multiply into symmetric memory. Return the ranks' products, and their buffers for the gathered rows."""
        shape = len(x), matrix.shape[1]
        parts = self.buffers.next("products", shape, x.dtype)
        torch.mm(x, matrix, out=parts[self.rank])
        return parts, self.buffers.next("joined", shape, x.dtype)


class _Junction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, schedule: FusedSchedule, x: Tensor, row: Tensor, residual: Tensor, norm: Tensor, eps: float,
        column: Tensor, keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, barrier = x.contiguous(), schedule.buffers.barrier
        parts, gathered = schedule.partial_product(x, row.t())
        barrier()
        summed = join_rows(parts, gathered, residual.contiguous(), norm, schedule.rank, eps)
        barrier()
        whole = gathered[schedule.rank]
        product = whole @ column.t()
        ctx.save_for_backward(x, row, summed, norm, column, *([whole.clone()] if keep else []))
        ctx.schedule, ctx.eps = schedule, eps
        return summed, product

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        schedule, barrier, stream = ctx.schedule, ctx.schedule.buffers.barrier, ctx.schedule.copies
        x, row, summed, norm, column, *kept = ctx.saved_tensors
        upstream, grad = (gradient.contiguous() for gradient in grads)
        # Without a kept tensor, normalise and gather again.
        whole = kept[0] if kept else schedule.gather(functional.rms_norm(summed, norm.shape, norm, ctx.eps))()
        parts, gathered = schedule.partial_product(grad, column)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            barrier()
            grad_summed, grad_norm = join_gradients(parts, gathered, summed, norm, upstream, schedule.rank, ctx.eps)
            barrier()
        grad_column = grad.t() @ whole
        torch.cuda.current_stream().wait_stream(stream)
        grad_y = gathered[schedule.rank]
        return None, grad_y @ row, grad_y.t() @ x, grad_summed, grad_norm, None, grad_column, None
