"""Triton kernels on rows of a table: list the distinct rows of a step, gather rows, and push them to their owners.

This module needs only torch, triton and `tpbench.kernels`.

Gather: torch's `index_select` gives each row a thread block of its own. If rows are short, the blocks take more time
than the bytes: on an H200 rows of 384 bytes took 0.63 ns each, three times what their bytes need. Here a program copies
several rows.

Push: each owner has an inbox addressed by row, with a slice of the table for each other rank, so that the owner need
not know counts or row numbers beforehand. Beside each row the kernel writes a mark, the number of the exchange (epoch).
The owner sees from the marks which rows arrived; an inbox is never cleared.

Search: each row of the table has a stamp, the number of the search (epoch) that last saw the row. The token that
changes a row's stamp to this search's number lists the row. Nothing must be sorted or cleared, and the number of listed
rows stays on the GPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton, not Python, gives a kernel's arguments their types.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpbench.kernels.cached_launch import cached_launch


@triton.jit(do_not_specialize=["count"])
def _gather_kernel(table, rows, output, table_rows, width, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy ROWS of the `count` rows by COLUMNS columns. A row outside the table becomes zeros."""
    column_blocks = tl.cdiv(width, COLUMNS)  # neighbouring programs take one row's parts: memory prefers whole rows
    index = tl.program_id(0) // column_blocks * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    valid = index < count
    row = tl.load(rows + index, mask=valid, other=-1).to(tl.int64)
    column = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS)  # (COLUMNS,)
    inside = (column < width)[None, :]
    present = inside & ((row >= 0) & (row < table_rows))[:, None]
    part = tl.load(table + row[:, None] * width + column[None, :], mask=present, other=0.0)  # (ROWS, COLUMNS)
    tl.store(output + index.to(tl.int64)[:, None] * width + column[None, :], part, mask=inside & valid[:, None])


# The interpreter's time depends on the number of programs, not of elements.
BLOCKS = (16, 256) if isinstance(_gather_kernel, triton.JITFunction) else (512, 512)
"""Rows and columns of a program that gathers or pushes."""


def gather_rows(table: Tensor, rows: Tensor, output: Tensor, *, blocks: tuple[int, int] = BLOCKS) -> Tensor:
    """Set `output[i] = table[rows[i]]` and return `output`. A row outside the table becomes zeros.

    table: (any, width), output: (len(rows), width) of its dtype, rows: int32 or int64; all contiguous.
    """
    assert table.is_contiguous() and rows.is_contiguous() and output.is_contiguous()
    assert output.shape == (len(rows), table.shape[1]) and output.dtype == table.dtype
    if output.numel():
        width = table.shape[1]
        block, columns = blocks[0], min(blocks[1], triton.next_power_of_2(width))
        programs = triton.cdiv(len(rows), block) * triton.cdiv(width, columns)
        launch = cached_launch(_gather_kernel, ROWS=block, COLUMNS=columns)
        launch(programs, (table, rows, output), (len(table), width), varying=(len(rows),))
    return output


@triton.jit(do_not_specialize=["length"])
def _push_kernel(
    grad, rows, count, inboxes, marks, epoch, misplaced, rows_per_rank, width, length,
    RANK: tl.constexpr, RANKS: tl.constexpr, INBOXES: tl.constexpr, COUNTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Push ROWS of this rank's touched rows by COLUMNS columns to their owners; only mark rows that it owns itself.

    The rows of a program lie far apart in the sorted list, so that all owners receive at any time. With COUNTED the
    list has `count` rows, which only the device knows, and `length` is its capacity.
    """
    listed = tl.load(count) if COUNTED else length
    now = tl.load(epoch)
    inboxes += now % INBOXES * RANKS
    marks += now % INBOXES * RANKS
    column_blocks = tl.cdiv(width, COLUMNS)  # neighbouring programs take one row's parts: memory prefers whole rows
    index = tl.program_id(0) // column_blocks + tl.arange(0, ROWS) * (tl.num_programs(0) // column_blocks)  # (ROWS,)
    valid = index < listed
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
    count: Tensor | None = None,
    blocks: tuple[int, int] = BLOCKS,
) -> None:
    """Write row r of `grad`, and a mark, into the inbox of its owner for each r of `rows`; for own rows only the mark.

    `grad`: (ranks * rows_per_rank, width) contiguous; rank r // rows_per_rank owns row r.
    `rows`: (any,) int32, distinct.
    `inboxes`: (any, ranks) int64, the address of each rank's inbox, (ranks - 1, rows_per_rank, width) of grad's dtype.
    Exchanges use the lines of this table in turn: exchange `epoch` uses line `epoch` modulo their number.
    `marks`: (any, ranks) int64, the address of each rank's marks, (ranks, rows_per_rank) int32, at first 0.
    `epoch`: (1,) int32 on the device, the mark: above 0.
    `misplaced`: (1,) int32, increased by the number of rows outside the table, which are left out.
    `count`: (1,) int32 on the device: only the first `count` of the `rows` are pushed. Without it all are.
    """
    if not len(rows):
        return
    assert grad.is_contiguous() and rows.is_contiguous()
    width, (inbox_lines, ranks) = grad.shape[1], inboxes.shape
    rows_per_rank = grad.shape[0] // ranks
    assert grad.shape[0] == ranks * rows_per_rank and marks.shape == inboxes.shape
    block, columns = blocks[0], min(blocks[1], triton.next_power_of_2(width))
    programs = triton.cdiv(len(rows), block) * triton.cdiv(width, columns)
    launch = cached_launch(
        _push_kernel, RANK=rank, RANKS=ranks, INBOXES=inbox_lines, COUNTED=count is not None,
        ROWS=block, COLUMNS=columns,
    )  # fmt: skip
    pointers = (grad, rows, count, inboxes, marks, epoch, misplaced)
    launch(programs, pointers, (rows_per_rank, width), varying=(len(rows),))


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
