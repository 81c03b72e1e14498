"""Touched rows of a table from this GPU's memory straight into their owners': gathered and sent in one pass.

Usable on its own: needs torch and triton alone. Each owner has an inbox that is addressed by row, a slice of the table
for each other rank, so that neither counts nor row numbers need be known there before. Beside a row goes a mark, the
number of the exchange that it is of, by which the owner tells what has come; so an inbox is never cleared.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# A kernel's arguments are what Triton makes of them.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["count", "epoch"])
def _push_kernel(
    grad, rows, count, inboxes, marks, epoch, rows_each, width, misplaced,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS of the rows that this rank touched by COLUMNS columns: to their owners what is others', its own only marked.

    The rows of a program lie far apart in their sorted list, so that at any time all owners are sent to.
    """
    parts = tl.cdiv(width, COLUMNS)  # of a row, by neighbouring programs: memory likes it whole
    index = tl.program_id(0) // parts + tl.arange(0, ROWS) * (tl.num_programs(0) // parts)
    given = index < count
    row = tl.load(rows + index, mask=given, other=0)
    inside = given & (row >= 0) & (row < RANKS * rows_each)
    owner = tl.where(inside, row // rows_each, RANK)
    local = row - owner * rows_each
    leaves = inside & (owner != RANK)

    column = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    mask = leaves[:, None] & (column < width)[None, :]
    part = tl.load(grad + row.to(tl.int64)[:, None] * width + column[None, :], mask=mask)
    # Without the hint nothing is known of addresses out of memory, and elements would be stored one by one.
    inbox = tl.multiple_of(tl.load(inboxes + owner).to(tl.pointer_type(grad.dtype.element_ty)), [16])
    place = (RANK - (owner < RANK).to(tl.int32)) * rows_each + local
    tl.store(inbox[:, None] + place.to(tl.int64)[:, None] * width + column[None, :], part, mask=mask)

    if tl.program_id(0) % parts == 0:
        mark = tl.load(marks + owner).to(tl.pointer_type(tl.int32))
        tl.store(mark + (RANK * rows_each + local), tl.zeros_like(row) + epoch, mask=inside)
        outside = tl.sum((given & ~inside).to(tl.int32), axis=0)
        if outside > 0:
            tl.atomic_add(misplaced, outside)


# In the interpreter cost is by program, not by element.
BLOCKS = (16, 256) if isinstance(_push_kernel, triton.JITFunction) else (512, 512)
"""Rows and columns of a program."""


def push_rows(
    grad: Tensor,
    rows: Tensor,
    inboxes: Tensor,
    marks: Tensor,
    *,
    epoch: int,
    rank: int,
    rows_each: int,
    misplaced: Tensor,
    blocks: tuple[int, int] = BLOCKS,
) -> None:
    """Row r of `grad` for each r of `rows` into rank r // rows_each's inbox, and a mark beside it; for r of this rank's
    own the mark alone.

    grad: (ranks * rows_each, width) contiguous. rows: (any,) int32, distinct.
    inboxes: (ranks,) int64, for each rank the address of its inbox, (ranks - 1, rows_each, width) like `grad`, a slice
    for each other rank. marks: the same of its (ranks, rows_each) int32. epoch: not 0, which marks are at first.
    misplaced: (1,) int32, to which is added how many rows are not of the table (they are left out).
    """
    if not len(rows):
        return
    assert grad.is_contiguous() and rows.is_contiguous()
    width, ranks = grad.shape[1], len(inboxes)
    assert grad.shape[0] == ranks * rows_each
    block, columns = blocks[0], min(blocks[1], triton.next_power_of_2(width))
    grid = (triton.cdiv(len(rows), block) * triton.cdiv(width, columns),)
    _push_kernel[grid](
        grad, rows, len(rows), inboxes, marks, epoch, rows_each, width, misplaced, rank, ranks, block, columns
    )
