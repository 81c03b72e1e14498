"""Rows from several ranks summed into the owner's slice of a table, in place: one kernel that reads each row once.

Usable on its own: needs torch and triton alone. `index_add_` reads and writes the owner's row once for each rank that
sends one, in no fixed order, rounding each time. Here a table from (rank, row) to the place of that rank's row among
those received turns the scatter into a gather: a program takes a block of the owner's rows, picks those that anybody
touched, adds up what each rank has for them in the order of ranks, in fp32, and writes them. The result does not depend
on timing. The table is made of row numbers alone: before there are values.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# A kernel's arguments are what Triton makes of them.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_PLACE_BLOCK = 1024


class Blocks(NamedTuple):
    """What a program of the merge works on."""

    block: int
    """The owner's rows that it looks at."""
    rows: int
    """Touched ones among them that it takes at a time."""
    columns: int


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
# In the interpreter cost is by program, not by element.
BLOCKS = Blocks(512, 512, 512) if INTERPRETED else Blocks(64, 16, 256)


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
def _here(table, rank, row, rows_each, epoch, among, PLACES: tl.constexpr):
    """Whether a rank has something for rows, which of the table tells its place or, without PLACES, that it is of this
    epoch."""
    entry = tl.load(table + rank * rows_each + row, mask=among, other=-1)
    if PLACES:
        return entry >= 0, entry
    else:  # noqa: RET505  # only a whole if and else leaves the branch not taken uncompiled
        return entry == epoch, row


@triton.jit(do_not_specialize=["epoch"])
def _merge_kernel(
    own, values, table, epoch, rows_each, width, scale,
    RANK: tl.constexpr, RANKS: tl.constexpr, PLACES: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of the slice by COLUMNS columns, of which ROWS at a time that anybody touched: loads of few touched
    rows among many are too few in flight to keep memory busy."""
    parts = tl.cdiv(width, COLUMNS)  # of a row, by neighbouring programs: memory likes it whole
    first = tl.program_id(0) // parts * BLOCK
    each = tl.arange(0, BLOCK)
    touched = tl.zeros((BLOCK,), tl.int32)
    for rank in tl.static_range(RANKS):
        known, _place = _here(table, rank, first + each, rows_each, epoch, first + each < rows_each, PLACES)
        touched |= known.to(tl.int32)
    ordinal = tl.where(touched != 0, tl.cumsum(touched, 0), 0)
    many = tl.sum(touched, axis=0)
    column = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    for begin in range(0, many, ROWS):
        wanted = begin + 1 + tl.arange(0, ROWS)
        some = wanted <= many
        found = (ordinal[None, :] == wanted[:, None]).to(tl.int32)
        row = first + tl.sum(found * each[None, :], axis=1)
        offset = row.to(tl.int64)[:, None] * width + column[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for rank in tl.static_range(RANKS):
            here, place = _here(table, rank, row, rows_each, epoch, some, PLACES)
            mask = here[:, None] & (column < width)[None, :]
            if rank == RANK:
                part = tl.load(own + offset, mask=mask, other=0.0)
            else:
                if not PLACES:
                    place += (rank - (rank > RANK)) * rows_each
                part = tl.load(values + place.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0)
            total += part.to(tl.float32)
        mean = _rounded(total * scale, own.dtype.element_ty)
        tl.store(own + offset, mean, mask=some[:, None] & (column < width)[None, :])


def place_rows(
    own_rows: Tensor,
    rows: Tensor,
    segments: Sequence[tuple[int, int]],
    *,
    rank: int,
    first_row: int,
    table: Tensor,
    misplaced: Tensor,
) -> None:
    """The table for `merge_rows`.

    own_rows: (any,) int32 or int64, numbers of the owner's rows that hold something. rows: (received,), numbers of
    those received. segments: for each rank the first of its received rows and how many they are, (0, 0) for `rank`, the
    owner. Within a segment rows are distinct.
    table: (ranks, rows_each) int32, overwritten. misplaced: (1,) int32, to which is added how many rows are not the
    owner's (they are left out): whoever calls looks at it when it suits.
    """
    ranks, rows_each = table.shape
    assert ranks == len(segments)
    table.fill_(-1)
    for source, (start, count) in enumerate(segments):
        peer = source != rank
        listed, start, count = (rows, start, count) if peer else (own_rows, 0, len(own_rows))
        if count:
            grid = (triton.cdiv(count, _PLACE_BLOCK),)
            _place_kernel[grid](
                table[source], listed, start, count, first_row, rows_each, misplaced, peer, _PLACE_BLOCK
            )  # fmt: skip


def merge_rows(
    own: Tensor,
    values: Tensor,
    table: Tensor,
    *,
    rank: int,
    scale: float,
    epoch: int | None = None,
    blocks: Blocks = BLOCKS,
    num_warps: int = 4,
) -> None:
    """own[i] = scale * (own[i] + sum of the other ranks' rows i), for each i that anybody touched.

    own: (rows_each, width) contiguous, overwritten; rows that nobody touched are left alone.
    table: (ranks, rows_each) int32. As `place_rows` made it, or with an epoch: a rank has something where this stands.
    values: contiguous, like `own` the rows received; with an epoch a slice like `own` for each rank but the owner.
    """
    rows_each, width = own.shape
    ranks = len(table)
    assert own.is_contiguous() and values.is_contiguous() and values.dtype == own.dtype
    assert table.shape[1] == rows_each and values.shape[-1] == width
    assert epoch is None or values.shape == (ranks - 1, *own.shape)
    block = min(blocks.block, triton.next_power_of_2(max(1, rows_each)))
    columns = min(blocks.columns, triton.next_power_of_2(width))
    grid = (triton.cdiv(rows_each, block) * triton.cdiv(width, columns),)
    _merge_kernel[grid](
        own, values, table, epoch or 0, rows_each, width, scale, rank, ranks, epoch is None,
        block, min(block, blocks.rows), columns, num_warps=num_warps,
    )  # fmt: skip
