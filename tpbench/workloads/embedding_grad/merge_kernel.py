"""Rows from several ranks summed into the owner's slice of a table, in place: one kernel that reads each row once.

Usable on its own: needs torch and triton alone. `index_add_` reads and writes the owner's row once for each rank that
sends one, in no fixed order, rounding each time. Here a table from (rank, row) to the place of that rank's row among
those received turns the scatter into a gather: a program takes a few of the owner's rows, adds up what each rank has
for them in the order of ranks, in fp32, and writes those that anybody touched. The result does not depend on timing.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# A kernel's arguments are what Triton makes of them.

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_PLACE_BLOCK = 1024


@triton.jit
def _rounded(values, dtype: tl.constexpr):
    """fp32 to `dtype`, to the nearest even: the interpreter's own conversion to bf16 drops the low bits."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        values = tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
    return values.to(dtype)


INTERPRETED: bool = not isinstance(_rounded, triton.JITFunction)
"""Whether the kernels run in Triton's interpreter: TRITON_INTERPRET=1 when triton was imported."""
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit(do_not_specialize=["start", "count", "first_row"])
def _place_kernel(
    table, rows, start, count, first_row, rows_each, misplaced, FROM_PEER: tl.constexpr, BLOCK: tl.constexpr
):
    """table[row - first_row] = where in `rows` it stands (0 for the owner's own, which stand where they are)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = index < count
    row = tl.load(rows + start + index, mask=given, other=0).to(tl.int64) - first_row
    inside = (row >= 0) & (row < rows_each)
    place = start + index if FROM_PEER else tl.zeros_like(index)
    tl.store(table + row, place.to(tl.int32), mask=given & inside)
    outside = tl.sum((given & ~inside).to(tl.int32), axis=0)
    if outside > 0:
        tl.atomic_add(misplaced, outside)


@triton.jit
def _merge_kernel(
    own, values, table, rows_each, width, scale,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the slice by COLUMNS columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    offset = row.to(tl.int64)[:, None] * width + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    touched = tl.zeros((ROWS,), tl.int32)
    for rank in tl.static_range(RANKS):
        place = tl.load(table + rank * rows_each + row, mask=row < rows_each, other=-1)
        has = (place >= 0)[:, None] & (column < width)[None, :]
        if rank == RANK:
            part = tl.load(own + offset, mask=has, other=0.0)
        else:
            part = tl.load(values + place.to(tl.int64)[:, None] * width + column[None, :], mask=has, other=0.0)
        total += part.to(tl.float32)
        touched |= (place >= 0).to(tl.int32)
    mean = _rounded(total * scale, own.dtype.element_ty)
    tl.store(own + offset, mean, mask=(touched != 0)[:, None] & (column < width)[None, :])


def merge_rows(
    own: Tensor,
    own_rows: Tensor,
    values: Tensor,
    rows: Tensor,
    segments: Sequence[tuple[int, int]],
    *,
    rank: int,
    first_row: int,
    scale: float,
    table: Tensor,
    misplaced: Tensor,
    block_rows: int = 16,
    block_columns: int = 256,
    num_warps: int = 4,
) -> None:
    """own[i] = scale * (own[i] + sum of the ranks' rows first_row + i), for each i that anybody touched.

    own: (rows_each, width) contiguous, overwritten; rows that nobody touched are left alone.
    own_rows: (any,) int32 or int64, numbers of the owner's rows that hold something.
    values, rows: (received, width) like `own`, contiguous, and (received,) int32 or int64, their numbers.
    segments: for each rank the first of its received rows and how many they are, (0, 0) for `rank`, the owner. Within a
    segment rows are distinct.
    table: (ranks, rows_each) int32, scratch. misplaced: (1,) int32, to which is added how many rows are not the
    owner's (they are left out): whoever calls looks at it when it suits.
    """
    rows_each, width = own.shape
    assert own.is_contiguous() and values.is_contiguous() and values.dtype == own.dtype
    assert table.shape == (len(segments), rows_each)
    table.fill_(-1)
    for source, (start, count) in enumerate(segments):
        peer = source != rank
        listed, start, count = (rows, start, count) if peer else (own_rows, 0, len(own_rows))
        if count:
            grid = (triton.cdiv(count, _PLACE_BLOCK),)
            _place_kernel[grid](
                table[source], listed, start, count, first_row, rows_each, misplaced, peer, _PLACE_BLOCK
            )  # fmt: skip
    if INTERPRETED:  # its cost is by program, not by element
        block_rows = block_columns = 512
    block_rows = min(block_rows, triton.next_power_of_2(max(1, rows_each)))
    block_columns = min(block_columns, triton.next_power_of_2(width))
    grid2 = (triton.cdiv(rows_each, block_rows), triton.cdiv(width, block_columns))
    _merge_kernel[grid2](
        own, values, table, rows_each, width, scale, rank, len(segments), block_rows, block_columns,
        num_warps=num_warps,
    )  # fmt: skip
