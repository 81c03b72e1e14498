"""Triton kernel that copies rows of a table next to each other, as `index_select` does, with several rows a program.

This module needs only torch, triton and `tpbench.kernels`. torch gives each row a thread block of its own. If rows are
short, the blocks take more time than the bytes: on an H200 rows of 384 bytes took 0.63 ns each, three times what their
bytes need.
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
"""Rows and columns of a program."""


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
