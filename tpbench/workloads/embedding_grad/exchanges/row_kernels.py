"""Triton kernels on rows of a table: list the distinct rows of a step, push rows to their owners, and merge them.

This module needs only torch, triton and `tpbench.kernels`.

Search: each row of the table has a stamp, the number of the search (epoch) that last saw the row. The token that
changes a row's stamp to this search's number lists the row. Nothing must be sorted or cleared, and the number of listed
rows stays on the GPU.

Push: each owner has an inbox addressed by row, with a slice of the table for each other rank, so that the owner need
not know counts or row numbers beforehand. Beside each row the kernel writes a mark, the number of the exchange (epoch).
The owner sees from the marks which rows arrived; an inbox is never cleared.

Merge: torch's `index_add_` reads and writes the owner's row once for each rank that sends one, in no fixed order, with
a rounding each time. Here a program takes a block of the owner's rows and selects those that any rank touched. It adds
what each rank has for them in the order of ranks, in fp32, and rounds once. Rows that came by collectives are found by
a table of positions, (rank, row of the owner), which needs no values.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton, not Python, gives a kernel's arguments their types.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpbench.kernels.cached_launch import INTERPRETED, cached_launch
from tpbench.kernels.two_pass.blocks import round_to

# The interpreter's time depends on the number of programs, not of elements.
PUSH_BLOCKS = (512, 512) if INTERPRETED else (16, 256)
"""Rows and columns of a program that pushes."""
MERGE_BLOCKS = (512, 512, 512) if INTERPRETED else (64, 16, 256)
"""Of a program that merges: rows that it inspects, touched rows among them that it adds up at a time, and columns."""


@triton.jit
def _push_kernel(
    grad, rows, count, inboxes, marks, epoch, misplaced, rows_per_rank, width,
    RANK: tl.constexpr, RANKS: tl.constexpr, INBOXES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Push ROWS of this rank's touched rows by COLUMNS columns to their owners; only mark rows that it owns itself.

    The rows of a program lie far apart in the list, so that all owners receive at any time.
    """
    now = tl.load(epoch)
    inboxes += now % INBOXES * RANKS
    marks += now % INBOXES * RANKS
    column_blocks = tl.cdiv(width, COLUMNS)  # neighbouring programs take one row's parts: memory prefers whole rows
    index = tl.program_id(0) // column_blocks + tl.arange(0, ROWS) * (tl.num_programs(0) // column_blocks)  # (ROWS,)
    valid = index < tl.load(count)
    row = tl.load(rows + index, mask=valid, other=0)
    inside = valid & (row >= 0) & (row < RANKS * rows_per_rank)
    owner = tl.where(inside, row // rows_per_rank, RANK)
    owner_row = row - owner * rows_per_rank
    remote = inside & (owner != RANK)

    column = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS)  # (COLUMNS,)
    mask = remote[:, None] & (column < width)[None, :]
    part = tl.load(grad + row.to(tl.int64)[:, None] * width + column[None, :], mask=mask)  # (ROWS, COLUMNS)
    # Without the hint the compiler knows no alignment of addresses read from memory, and stores elements one by one.
    inbox = tl.multiple_of(tl.load(inboxes + owner).to(tl.pointer_type(grad.dtype.element_ty)), [16])
    inbox_row = (RANK - (owner < RANK).to(tl.int32)) * rows_per_rank + owner_row
    tl.store(inbox[:, None] + inbox_row.to(tl.int64)[:, None] * width + column[None, :], part, mask=mask)

    if tl.program_id(0) % column_blocks == 0:
        mark = tl.load(marks + owner).to(tl.pointer_type(tl.int32))
        tl.store(mark + (RANK * rows_per_rank + owner_row), tl.zeros_like(row) + now, mask=inside)
        outside = tl.sum((valid & ~inside).to(tl.int32), axis=0)
        if outside > 0:
            tl.atomic_add(misplaced, outside)


def push_rows(
    grad: Tensor,
    rows: Tensor,
    inboxes: Tensor,
    marks: Tensor,
    *,
    epoch: Tensor,
    rank: int,
    misplaced: Tensor,
    count: Tensor,
    blocks: tuple[int, int] = PUSH_BLOCKS,
) -> None:
    """Write row r of `grad`, and a mark, into the inbox of its owner for each r of `rows`; for own rows only the mark.

    `grad`: (ranks * rows_per_rank, width) contiguous; rank r // rows_per_rank owns row r.
    `rows`: (any,) int32, of which the first `count`, (1,) int32 on the device, are distinct and pushed.
    `inboxes`: (any, ranks) int64, the address of each rank's inbox, (ranks - 1, rows_per_rank, width) of grad's dtype.
    Exchanges use the lines of this table in turn: exchange `epoch` uses line `epoch` modulo their number.
    `marks`: (any, ranks) int64, the address of each rank's marks, (ranks, rows_per_rank) int32, at first 0.
    `epoch`: (1,) int32 on the device, the mark: above 0.
    `misplaced`: (1,) int32, increased by the number of rows outside the table, which are left out.
    """
    if not len(rows):
        return
    assert grad.is_contiguous() and rows.is_contiguous()
    width, (inbox_lines, ranks) = grad.shape[1], inboxes.shape
    rows_per_rank = grad.shape[0] // ranks
    assert grad.shape[0] == ranks * rows_per_rank and marks.shape == inboxes.shape
    block, columns = blocks[0], min(blocks[1], triton.next_power_of_2(width))
    programs = triton.cdiv(len(rows), block) * triton.cdiv(width, columns)
    launch = cached_launch(_push_kernel, RANK=rank, RANKS=ranks, INBOXES=inbox_lines, ROWS=block, COLUMNS=columns)
    pointers = (grad, rows, count, inboxes, marks, epoch, misplaced)
    launch(programs, pointers, (rows_per_rank, width))


@triton.jit
def _search_kernel(
    tokens, stamps, epoch, lists, counts, misplaced, count, table_rows, rows_per_list, capacity,
    LISTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the rows of BLOCK tokens that no other token of this search has listed, each in the list of its owner."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    valid = index < count
    row = tl.load(tokens + index, mask=valid, other=0)
    inside = valid & (row >= 0) & (row < table_rows)
    now = tl.load(epoch)
    before = tl.atomic_xchg(stamps + row, tl.zeros_like(row) + now, mask=inside, sem="relaxed")
    first = inside & (before != now)
    for owner in tl.static_range(LISTS):
        mine = (first & (row // rows_per_list == owner)).to(tl.int32)
        # The order of programs varies, so that the order within a list does, too.
        start = tl.atomic_add(counts + owner, tl.sum(mine, axis=0), sem="relaxed")
        slot = start + tl.cumsum(mine, 0) - 1
        tl.store(lists + owner * capacity + slot, row, mask=mine != 0)
    outside = tl.sum((valid & ~inside).to(tl.int32), axis=0)
    if outside > 0:
        tl.atomic_add(misplaced, outside)


SEARCH_BLOCK = 1024
"""Tokens of a program that searches."""


def list_rows(
    tokens: Tensor,
    stamps: Tensor,
    epoch: Tensor,
    lists: Tensor,
    counts: Tensor,
    *,
    rows_per_list: int,
    misplaced: Tensor,
    block: int = SEARCH_BLOCK,
) -> None:
    """List each row that `tokens` contain once. All tensors are contiguous int32 on one device.

    `tokens`: rows of the table, in any shape; rows may repeat.
    `stamps`: (rows of the table,), at first 0.
    `epoch`: (1,), the number of this search: not 0, and not that of the last search.
    `lists`: (owners, capacity). Owner o has the rows from o * rows_per_list; its rows are listed in lists[o], in no
    fixed order. The capacity must suffice.
    `counts`: (owners,), at first 0: the number of rows in each list.
    `misplaced`: (1,), increased by the number of tokens outside the table, which are left out.
    """
    count = tokens.numel()
    if count:
        owners, capacity = lists.shape
        launch = cached_launch(_search_kernel, LISTS=owners, BLOCK=block)
        pointers = (tokens, stamps, epoch, lists, counts, misplaced)
        launch(triton.cdiv(count, block), pointers, (count, len(stamps), rows_per_list, capacity))


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


def merge_rows(
    own: Tensor,
    values: Tensor,
    table: Tensor,
    epoch: Tensor | None = None,
    *,
    rank: int,
    scale: float,
    blocks: tuple[int, int, int] = MERGE_BLOCKS,
) -> None:
    """Set own[i] = scale * (own[i] + sum of the other ranks' rows i), for each i that any rank touched.

    `own`: (rows_per_rank, width) contiguous, overwritten in touched rows only.
    `values`: (received, width) contiguous, of own's dtype.
    `table`: (ranks, rows_per_rank) int32, the position in `values` of each row that a rank has, and -1 elsewhere.
    Positions of the owner's own rows are not read.
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
    block = min(blocks[0], triton.next_power_of_2(max(1, rows_per_rank)))
    columns = min(blocks[2], triton.next_power_of_2(width))
    programs = triton.cdiv(rows_per_rank, block) * triton.cdiv(width, columns)
    launch = cached_launch(
        _merge_kernel, RANK=rank, RANKS=ranks, INBOXES=inboxes,
        BLOCK=block, ROWS=min(block, blocks[1]), COLUMNS=columns,
    )  # fmt: skip
    launch(programs, (own, values, table, epoch), (rows_per_rank, width), (scale,))
