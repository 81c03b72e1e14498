"""Triton kernel that sums rows from several ranks into the owner's slice of a table, in place.

This module needs only torch, triton and `tpbench.kernels`. torch's `index_add_` reads and writes the owner's row once
for each rank that sends one, in no fixed order, with a rounding each time. Here each row is read once and rounded once.

A table maps (rank, row of the owner) to the position of that rank's row among those received, which turns the scatter
into a gather. A program takes a block of the owner's rows and selects those that any rank touched. It adds what each
rank has for them in the order of ranks, in fp32, so that the result does not depend on timing. The table needs row
numbers only: it can be built before there are values.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton, not Python, gives a kernel's arguments their types.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tpbench.kernels.cached_launch import cached_launch
from tpbench.kernels.two_pass.state import round_to

_PLACE_BLOCK = 1024


class Blocks(NamedTuple):
    """Sizes of the work of one program of the merge."""

    block: int
    """Rows of the owner that a program inspects."""
    rows: int
    """Touched rows among them that it adds up at a time."""
    columns: int


INTERPRETED: bool = not isinstance(round_to, triton.JITFunction)
"""True if the kernels run in Triton's interpreter: TRITON_INTERPRET was 1 at the import of triton."""
# The interpreter's time depends on the number of programs, not of elements.
BLOCKS = Blocks(512, 512, 512) if INTERPRETED else Blocks(64, 16, 256)


@triton.jit(do_not_specialize=["source", "start", "count", "first_row"])
def _place_kernel(
    table, rows, misplaced, rows_per_rank, source, start, count, first_row, FROM_PEER: tl.constexpr, BLOCK: tl.constexpr
):
    """Set table[source, row - first_row] to the row's position in `rows`, or to 0 for the owner's own rows.

    table: (ranks, rows_per_rank). rows: (any,), of which [start, start + count) are those of the rank `source`.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    valid = index < count
    row = tl.load(rows + start + index, mask=valid, other=0).to(tl.int64) - first_row
    inside = (row >= 0) & (row < rows_per_rank)
    position = start + index if FROM_PEER else tl.zeros_like(index)
    line = tl.cast(source, tl.int64) * rows_per_rank
    tl.store(table + line + row, position.to(tl.int32), mask=valid & inside)
    outside = tl.sum((valid & ~inside).to(tl.int32), axis=0)
    if outside > 0:
        tl.atomic_add(misplaced, outside)


@triton.jit
def _find(table, rank, row, rows_per_rank, epoch, valid, POSITIONS: tl.constexpr):
    """Return a mask of the rows that a rank has, and where their values are.

    With POSITIONS a table entry is the position of the values. Without it a rank has the rows whose entry is `epoch`,
    and the values are addressed by row.
    """
    entry = tl.load(table + rank * rows_per_rank + row, mask=valid, other=-1)
    if POSITIONS:
        return entry >= 0, entry
    else:  # noqa: RET505  # only a whole if and else leaves the branch not taken uncompiled
        return entry == epoch, row


@triton.jit
def _merge_kernel(
    own, values, table, epoch, rows_per_rank, width, scale,
    RANK: tl.constexpr, RANKS: tl.constexpr, INBOXES: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK rows of the slice by COLUMNS columns, ROWS touched rows at a time.

    Without this selection too few loads would be in flight to keep memory busy if few of many rows are touched. With
    INBOXES above 0, `values` and `table` are tables of addresses, with a line for each inbox and a column for each
    rank.
    """
    POSITIONS: tl.constexpr = INBOXES == 0
    now = 0
    if not POSITIONS:
        now = tl.load(epoch)
        place = now % INBOXES * RANKS + RANK
        # Without the hint the compiler knows no alignment of addresses read from memory.
        values = tl.multiple_of(tl.load(values + place).to(tl.pointer_type(own.dtype.element_ty)), [16])
        table = tl.load(table + place).to(tl.pointer_type(tl.int32))
    column_blocks = tl.cdiv(width, COLUMNS)  # neighbouring programs take one row's parts: memory prefers whole rows
    first = tl.program_id(0) // column_blocks * BLOCK
    offsets = tl.arange(0, BLOCK)
    touched = tl.zeros((BLOCK,), tl.int32)
    for rank in tl.static_range(RANKS):
        rows = first + offsets
        in_block, _position = _find(table, rank, rows, rows_per_rank, now, rows < rows_per_rank, POSITIONS)
        touched |= in_block.to(tl.int32)
    ordinal = tl.where(touched != 0, tl.cumsum(touched, 0), 0)  # (BLOCK,): 1, 2, ... for touched rows, else 0
    touched_count = tl.sum(touched, axis=0)
    column = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    for begin in range(0, touched_count, ROWS):
        wanted = begin + 1 + tl.arange(0, ROWS)
        valid = wanted <= touched_count
        selected = (ordinal[None, :] == wanted[:, None]).to(tl.int32)  # (ROWS, BLOCK), one 1 in each valid row
        row = first + tl.sum(selected * offsets[None, :], axis=1)  # (ROWS,)
        offset = row.to(tl.int64)[:, None] * width + column[None, :]  # (ROWS, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for rank in tl.static_range(RANKS):
            present, position = _find(table, rank, row, rows_per_rank, now, valid, POSITIONS)
            mask = present[:, None] & (column < width)[None, :]
            if rank == RANK:
                part = tl.load(own + offset, mask=mask, other=0.0)
            else:
                if not POSITIONS:
                    position += (rank - (rank > RANK)) * rows_per_rank
                part = tl.load(values + position.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0)
            total += part.to(tl.float32)
        mean = round_to(total * scale, own.dtype.element_ty)
        tl.store(own + offset, mean, mask=valid[:, None] & (column < width)[None, :])


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
    """Fill the table for `merge_rows`, on the owner `rank`, whose slice begins at row `first_row`.

    `own_rows`: (own,) int32 or int64, numbers of the owner's rows that hold something.
    `rows`: (received,), numbers of the received rows.
    `segments`: for each rank the first of its received rows and their number, (0, 0) for the owner. Rows of one
    segment are distinct.
    `table`: (ranks, rows_per_rank) int32, overwritten.
    `misplaced`: (1,) int32, increased by the number of rows that are not the owner's. These rows are left out, and the
    caller may check `misplaced` at any later time.
    """
    ranks, rows_per_rank = table.shape
    assert ranks == len(segments)
    table.fill_(-1)
    for source, (start, count) in enumerate(segments):
        from_peer = source != rank
        listed, start, count = (rows, start, count) if from_peer else (own_rows, 0, len(own_rows))
        if count:
            launch = cached_launch(_place_kernel, FROM_PEER=from_peer, BLOCK=_PLACE_BLOCK)
            programs, varying = triton.cdiv(count, _PLACE_BLOCK), (source, start, count, first_row)
            launch(programs, (table, listed, misplaced), (rows_per_rank,), varying=varying)


def merge_rows(
    own: Tensor,
    values: Tensor,
    table: Tensor,
    epoch: Tensor | None = None,
    *,
    rank: int,
    scale: float,
    blocks: Blocks = BLOCKS,
) -> None:
    """Set own[i] = scale * (own[i] + sum of the other ranks' rows i), for each i that any rank touched.

    `own`: (rows_per_rank, width) contiguous, overwritten in touched rows only.
    `values`: (received, width) contiguous, of own's dtype.
    `table`: (ranks, rows_per_rank) int32, from `place_rows`.
    `epoch`: with it, other ranks wrote the rows into this rank's inbox. Then `values`, `table` and `epoch` are the
    arguments `inboxes`, `marks` and `epoch` of `push_rows`, and a rank has touched the rows whose mark is `epoch`.
    """
    rows_per_rank, width = own.shape
    assert own.is_contiguous()
    if epoch is None:
        assert values.is_contiguous() and values.dtype == own.dtype
        assert table.shape[1] == rows_per_rank and values.shape[-1] == width
        ranks, inboxes = len(table), 0
    else:
        assert table.shape == values.shape
        inboxes, ranks = values.shape
    block = min(blocks.block, triton.next_power_of_2(max(1, rows_per_rank)))
    columns = min(blocks.columns, triton.next_power_of_2(width))
    programs = triton.cdiv(rows_per_rank, block) * triton.cdiv(width, columns)
    launch = cached_launch(
        _merge_kernel, RANK=rank, RANKS=ranks, INBOXES=inboxes,
        BLOCK=block, ROWS=min(block, blocks.rows), COLUMNS=columns,
    )  # fmt: skip
    launch(programs, (own, values, table, epoch), (rows_per_rank, width), (scale,))
