"""The step from a row-parallel to the next column-parallel linear as one kernel, through the memory of peers.

Four operations lie between the two products: reduce-scatter, residual, RMSNorm and all-gather. Here the first product
is written to symmetric memory. Behind a barrier on the stream, one kernel sums, normalises and gathers this rank's rows
(`tpbench.kernels.junction`), and behind a second barrier the next product reads the result where it lies. The backward
pass is the mirror; its kernel runs beside the product for the gradient of the column-parallel weight. Large shards stay
on this rank: copy engines gather them beside the next product, as in `copy_engine`.

The first all-gather and the last reduce-scatter of a block or a stack are by direct copies and sums, if shards are
small, or else the copy engine's.

Buffers alternate by name. A rank writes to one again after a barrier of the use in between, which a peer reaches only
when it has read the buffer. Rows for peers in a junction are written behind a barrier of the same junction. A captured
graph begins with a barrier, as that of the copy engine does.

What was tried: device time in us of one block, forward and backward as a graph, on two H100s (bf16; width 4096 is 8B):

| tokens | width | plain | copy engine | kernel, plain ends | kernel, direct copies | kernel, engine's gather |
| 128 | 4096 | 542 | 762 | 508 | 515 | 673 |
| 512 | 4096 | 964 | 1013 | 879 | 838 | 929 |
| 1024 | 4096 | 1614 | 1495 | - | 1428 | 1437 |
| 2048 | 4096 | 2983 | 2686 | 2836 | 2721 | 2644 |
| 8192 | 4096 | 12790 | 11410 | 12075 | 12014 | 11514 |
| 512 | 8192 | 2705 | 2688 | - | 2494 | 2615 |

The two right columns are this schedule below and above LARGE_BYTES. Plain ends are NCCL's first gather and last
scatter, from an earlier run, in which the 11410 and 11514 of 8192 tokens were 11580 and 11389. Without a graph the host
bounds these steps: at 128 tokens 4.9 ms of wall time, 4.2 with the plain schedule. Backward kernels of 32 or 64
programs, to leave the product more multiprocessors, took 2744 and 2684 us at 2048 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tpbench.comm.parallel_linears import Pending
from tpbench.kernels.junction import join_rows
from tpbench.workloads.tp_block.execution.copy_engine import CopyEngineSchedule

LARGE_BYTES = 2**23
"""Shards of this size in bytes are gathered and scattered by the copy engines."""


class FusedSchedule(CopyEngineSchedule):
    """Junctions are one kernel. Other operations on small shards are one barrier, and on large ones the engine's."""

    def gather(self, shard: Tensor) -> Pending:
        if shard.nbytes >= LARGE_BYTES:
            return super().gather(shard)
        places, whole = self.places(shard, "gathered")
        for place in places:
            place.copy_(shard)
        self.buffers.barrier()
        return lambda: whole

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        if shard.nbytes >= LARGE_BYTES:
            return super().gather_matmul(shard, matrix, keep=keep)
        whole = self.gather(shard)()
        return whole.clone() if keep else whole, whole @ matrix

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        if len(whole) * matrix.shape[1] * whole.itemsize >= LARGE_BYTES * self.size:
            return super().matmul_scatter(whole, matrix, awaited=awaited)
        first, *others = self.parts(whole, matrix)
        self.buffers.barrier()
        for part in others:
            first = first + part
        return lambda: first

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
        ranks = [*self.peers, self.rank]
        return [gathered[rank].chunk(self.size)[self.rank] for rank in ranks], gathered[self.rank]


class _Junction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, schedule: FusedSchedule, x: Tensor, row: Tensor, residual: Tensor, norm: Tensor, eps: float,
        column: Tensor, keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, residual, barrier = x.contiguous(), residual.contiguous(), schedule.buffers.barrier
        parts = schedule.parts(x, row.t())
        barrier()
        if residual.nbytes < LARGE_BYTES:
            places, whole = schedule.places(residual, "joined")
            summed, _ = join_rows(parts, places, residual, norm, eps)
            barrier()
            product, whole = whole @ column.t(), whole.clone() if keep else whole
        else:
            shard = torch.empty_like(residual)
            summed, _ = join_rows(parts, [shard], residual, norm, eps)
            whole, product = schedule.gather_matmul(shard, column.t(), keep=keep)
        ctx.save_for_backward(x, row, summed, norm, column, *([whole] if keep else []))
        ctx.schedule, ctx.eps = schedule, eps
        return summed, product

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        schedule, barrier, stream = ctx.schedule, ctx.schedule.buffers.barrier, ctx.schedule.copies
        x, row, summed, norm, column, *kept = ctx.saved_tensors
        upstream, grad = (gradient.contiguous() for gradient in grads)
        # Without a kept tensor, normalise and gather again.
        whole = kept[0] if kept else schedule.gather(functional.rms_norm(summed, norm.shape, norm, ctx.eps))()
        parts, small = schedule.parts(grad, column), summed.nbytes < LARGE_BYTES
        places, grad_y = schedule.places(summed, "joined") if small else ([], None)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            barrier()
            grad_summed, grad_norm = join_rows(parts, places, summed, norm, ctx.eps, upstream)
            if small:
                barrier()
        grad_column = grad.t() @ whole
        torch.cuda.current_stream().wait_stream(stream)
        if grad_y is None:
            grad_y, grad_x = schedule.gather_matmul(grad_summed, row, keep=False)
        else:
            grad_x = grad_y @ row
        return None, grad_x, grad_y.t() @ x, grad_summed, grad_norm, None, grad_column, None
