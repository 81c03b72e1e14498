"""The product of a stored gradient and an upstream factor, which is one for most rows."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpbench.kernels.cached_launch import cached_launch
from tpbench.kernels.two_pass.kernels import block_for, is_wide, launching, tile
from tpbench.kernels.two_pass.state import block_columns, round_to


@triton.jit
def scale_kernel(
    values, factor, n_rows, n_columns, values_row, values_column, PER_ROW: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply values by factor in fp32, rounded once. Rows with the factor 1, which is common, are not written."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    by = tl.load(factor + row * PER_ROW, mask=row < n_rows, other=1.0).to(tl.float32)
    changed = (by != 1.0) & (row < n_rows)
    if tl.max(changed.to(tl.int32), axis=0) > 0:
        for start in range(0, n_columns, BLOCK):
            column = block_columns(start, WIDE, BLOCK)
            mask = changed[:, None] & (column < n_columns)[None, :]
            place = values + (row * values_row)[:, None] + (column * values_column)[None, :]
            scaled = tl.load(place, mask=mask, other=0.0).to(tl.float32) * by[:, None]
            tl.store(place, round_to(scaled, values.dtype.element_ty), mask=mask)


def scale_rows(grad: Tensor, factor: Tensor) -> Tensor:
    """Multiply (rows, columns) by a factor, () or (rows,), in place. Rows whose factor is 1 are not written."""
    rows, columns = grad.shape
    if grad.numel():
        block = block_for(columns)
        tile_rows, options = tile(rows, block)
        wide = is_wide(columns, block, grad.stride())
        scale = cached_launch(
            scale_kernel, PER_ROW=factor.dim(), WIDE=wide, ROWS=tile_rows, BLOCK=block, **options
        )  # fmt: skip
        with launching(grad.device):
            scale(-(-rows // tile_rows), (grad, factor), (rows, columns, *grad.stride()))
    return grad
