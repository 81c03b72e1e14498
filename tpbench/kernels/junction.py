"""Triton kernel between a row-parallel and a column-parallel linear: sum over ranks, residual, RMSNorm, all-gather.

Each rank owns an equal run of the rows. A program takes one of its rank's rows at a time. It reads the row from the
memory of every rank and adds the parts in rank order, in fp32, so that the result does not depend on timing. It writes
the finished row to the memory of every rank. The row stays in registers in between. The caller orders the ranks: all
parts must be written before the launch, and nobody may read the gathered rows before all ranks' launches have ended.

The backward pass has the same shape, with the gradient of the RMSNorm between the sum and the push.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton, not Python, gives a kernel's arguments their types.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpbench.kernels.cached_launch import cached_launch
from tpbench.kernels.two_pass.state import round_to

ELEMENTS_PER_WARP = 512
"""Elements of a row for each warp of a program."""
MOST_WARPS = 16
PROGRAMS = 528
"""Most programs of a launch: four for each multiprocessor of an H100."""


@triton.jit
def _junction_kernel(
    parts, gathered, residual, weight, upstream, result, weight_grads, rows, width, first_row, eps,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr, SUM: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Process every num_programs-th of this rank's rows, which begin at row `first_row` of `parts` and `gathered`."""
    column = tl.arange(0, COLUMNS)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=0.0).to(SUM)
    weight_grad = tl.zeros((COLUMNS,), SUM)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        own = tl.cast(row, tl.int64) * width + column
        shared = tl.cast(first_row + row, tl.int64) * width + column
        total = tl.zeros((COLUMNS,), SUM)
        for rank in tl.static_range(RANKS):
            total += tl.load(parts[rank] + shared, mask=inside, other=0.0).to(SUM)
        stream = tl.load(residual + own, mask=inside, other=0.0).to(SUM)
        if not BACKWARD:
            kept = round_to(stream + total, result.dtype.element_ty)
            stream = kept.to(SUM)
        normed = stream * tl.rsqrt(tl.sum(stream * stream, axis=0) / width + eps)
        if BACKWARD:
            weight_grad += total * normed
            slope = total * scale
            slope -= normed * (tl.sum(slope * normed, axis=0) / width)
            slope *= tl.rsqrt(tl.sum(stream * stream, axis=0) / width + eps)
            slope += tl.load(upstream + own, mask=inside, other=0.0).to(SUM)
            kept = round_to(slope, result.dtype.element_ty)
            sent = kept
        else:
            sent = round_to(normed * scale, result.dtype.element_ty)
        tl.store(result + own, kept, mask=inside)
        for rank in tl.static_range(RANKS):
            tl.store(gathered[rank] + shared, sent, mask=inside)
    if BACKWARD:
        tl.store(weight_grads + tl.program_id(0) * width + column, weight_grad, mask=inside)


def join_rows(
    parts: Sequence[Tensor], gathered: Sequence[Tensor], residual: Tensor, weight: Tensor, rank: int, eps: float
) -> Tensor:
    """Sum this rank's rows of `parts`, add the residual, and write RMSNorm(sum) * weight to all ranks' `gathered`.

    `parts`, `gathered`: by rank, (ranks * rows, width) in that rank's memory. `residual`: (rows, width). `weight`:
    (width,). All are contiguous and of one dtype. Returns the sum, which is the residual from now on.
    """
    result = torch.empty_like(residual)
    _launch(parts, gathered, residual, weight, None, result, None, rank, eps, min(len(residual), PROGRAMS))
    return result


def join_gradients(
    parts: Sequence[Tensor], gathered: Sequence[Tensor], residual: Tensor, weight: Tensor, upstream: Tensor, rank: int,
    eps: float, programs: int = PROGRAMS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write the gradient of the forward pass' sum, of this rank's rows, to all ranks' `gathered`.

    `parts`: of the gradient of the normalised rows. `residual`: what the forward pass returned, and `upstream` its
    other gradient. The other arguments are those of `join_rows`. Returns the gradients of the sum, (rows, width), and
    of the weight by this rank's rows.
    """
    result, programs = torch.empty_like(residual), max(1, min(len(residual), programs))
    wide = torch.float64 if residual.dtype == torch.float64 else torch.float32
    weight_grads = residual.new_empty((programs, residual.shape[1]), dtype=wide)
    _launch(parts, gathered, residual, weight, upstream, result, weight_grads, rank, eps, programs)
    return result, weight_grads.sum(0).to(weight.dtype)


def _launch(
    parts: Sequence[Tensor], gathered: Sequence[Tensor], residual: Tensor, weight: Tensor, upstream: Tensor | None,
    result: Tensor, weight_grads: Tensor | None, rank: int, eps: float, programs: int,
) -> None:  # fmt: skip
    rows, width = residual.shape
    ranks, columns = len(parts), triton.next_power_of_2(width)
    accumulator = tl.float64 if residual.dtype == torch.float64 else tl.float32
    launch = cached_launch(
        _junction_kernel, RANKS=ranks, COLUMNS=columns, SUM=accumulator,
        BACKWARD=upstream is not None, num_warps=min(MOST_WARPS, max(1, columns // ELEMENTS_PER_WARP)),
    )  # fmt: skip
    # Each rank first writes to the next one, so that no two ranks write to the same one at once.
    ordered = tuple(gathered[(rank + 1 + peer) % ranks] for peer in range(ranks))
    pointers = tuple(parts), ordered, residual, weight, upstream, result, weight_grads
    if programs:
        launch(programs, pointers, (rows, width, rank * rows), (eps,))
