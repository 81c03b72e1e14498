"""Rows of a table next to each other, as `index_select` has them, several rows a program.

Usable on its own: needs torch and triton alone. torch gives each row a block of threads of its own. Where rows are
short (384 bytes took 0.63 ns each on an H200, three times what their bytes take) it is the blocks that cost.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# A kernel's arguments are what Triton makes of them.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["count"])
def _gather_kernel(table, rows, output, count, table_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS of the rows by COLUMNS columns; zeros for a row that the table does not have."""
    parts = tl.cdiv(width, COLUMNS)  # of a row, by neighbouring programs: memory likes it whole
    index = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    given = index < count
    row = tl.load(rows + index, mask=given, other=-1).to(tl.int64)
    column = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < width)[None, :]
    there = inside & ((row >= 0) & (row < table_rows))[:, None]
    part = tl.load(table + row[:, None] * width + column[None, :], mask=there, other=0.0)
    tl.store(output + index.to(tl.int64)[:, None] * width + column[None, :], part, mask=inside & given[:, None])


# In the interpreter cost is by program, not by element.
BLOCKS = (16, 256) if isinstance(_gather_kernel, triton.JITFunction) else (512, 512)
"""Rows and columns of a program."""


def gather_rows(table: Tensor, rows: Tensor, output: Tensor, *, blocks: tuple[int, int] = BLOCKS) -> Tensor:
    """`output[i] = table[rows[i]]`; returns it. A row that the table does not have becomes zeros.

    table: (any, width), output: (len(rows), width) of its dtype, rows: int32 or int64; all contiguous.
    """
    assert table.is_contiguous() and rows.is_contiguous() and output.is_contiguous()
    assert output.shape == (len(rows), table.shape[1]) and output.dtype == table.dtype
    if output.numel():
        width = table.shape[1]
        block, columns = blocks[0], min(blocks[1], triton.next_power_of_2(width))
        grid = (triton.cdiv(len(rows), block) * triton.cdiv(width, columns),)
        _gather_kernel[grid](table, rows, output, len(rows), len(table), width, block, columns)
    return output
