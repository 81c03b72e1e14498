"""Triton kernel between a row-parallel and a column-parallel linear: sum over ranks, residual, RMSNorm, all-gather.

A program reads one of this rank's rows from the memory of every rank, adds the parts in rank order, in fp32, and writes
the finished row to the memory of every rank. The backward pass is alike, with the gradient of the RMSNorm. The caller
orders the ranks: all parts are written before any launch, and no row is read before all have ended. Its times are in
`tpbench/docs/tp_block.md`.
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
from tpbench.kernels.two_pass.blocks import round_to

PROGRAMS = 264
"""Most programs of a launch: two for each multiprocessor of an H100."""


@triton.jit
def _junction_kernel(
    parts, places, residual, weight, upstream, result, weight_grads, rows, width, eps,
    PARTS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, SUM: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Process every num_programs-th of this rank's rows, with sums in the type SUM."""
    column = tl.arange(0, COLUMNS)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=0.0).to(SUM)
    weight_grad = tl.zeros((COLUMNS,), SUM)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * width + column
        total = tl.zeros((COLUMNS,), SUM)
        for part in tl.static_range(PARTS):
            total += tl.load(parts[part] + offset, mask=inside, other=0.0).to(SUM)
        stream = tl.load(residual + offset, mask=inside, other=0.0).to(SUM)
        if not BACKWARD:
            kept = round_to(stream + total, result.dtype.element_ty)
            stream = kept.to(SUM)
        inverse = tl.rsqrt(tl.sum(stream * stream, axis=0) / width + eps)
        normed = stream * inverse
        if BACKWARD:
            weight_grad += total * normed
            slope = total * scale
            slope = (slope - normed * (tl.sum(slope * normed, axis=0) / width)) * inverse
            slope += tl.load(upstream + offset, mask=inside, other=0.0).to(SUM)
            kept = round_to(slope, result.dtype.element_ty)
            sent = kept
        else:
            sent = round_to(normed * scale, result.dtype.element_ty)
        tl.store(result + offset, kept, mask=inside)
        for place in tl.static_range(PLACES):
            tl.store(places[place] + offset, sent, mask=inside)
    if BACKWARD:
        tl.store(weight_grads + tl.program_id(0) * width + column, weight_grad, mask=inside)


def join_rows(
    parts: Sequence[Tensor], places: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float,
    upstream: Tensor | None = None, programs: int = PROGRAMS,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Add the parts to the residual, write RMSNorm(sum) * weight to all places, and return the sum and None.

    `parts` are this rank's rows of each rank's product, `places` those of each rank's gathered tensor. All tensors are
    contiguous and of one dtype, (rows, width), and the weight (width,). With `upstream` this is the backward pass, for
    `parts` of the gradient of the normalised rows, the sum as `residual`, and the sum's other gradient as `upstream`.
    Return, and write to all places, the sum's whole gradient. Return that of the weight, by these rows, too.
    """
    rows, width = residual.shape
    programs, columns = min(rows, programs), triton.next_power_of_2(width)
    is_double, result = residual.dtype == torch.float64, torch.empty_like(residual)
    wide = torch.float64 if is_double else torch.float32
    weight_grads = None if upstream is None else residual.new_empty((programs, width), dtype=wide)
    launch = cached_launch(
        _junction_kernel, PARTS=len(parts), PLACES=len(places), COLUMNS=columns,
        SUM=tl.float64 if is_double else tl.float32, BACKWARD=upstream is not None,
        num_warps=min(16, max(1, columns // 512)),
    )  # fmt: skip
    pointers = tuple(parts), tuple(places), residual, weight, upstream, result, weight_grads
    launch(programs, pointers, (rows, width), (eps,))
    return result, None if weight_grads is None else weight_grads.sum(0).to(weight.dtype)
