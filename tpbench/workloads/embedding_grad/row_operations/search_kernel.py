"""Triton kernel that lists the distinct rows of a step's tokens on the GPU, without the host.

This module needs only torch, triton and `tpbench.kernels`. Each row of the table has a stamp: the number of the search
(epoch) that last saw the row. The token that changes a row's stamp to this search's number lists the row. Nothing must
be sorted or cleared, and the number of listed rows stays on the GPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton, not Python, gives a kernel's arguments their types.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpbench.kernels.cached_launch import cached_launch


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


BLOCK = 1024
"""Tokens of a program."""


def list_rows(
    tokens: Tensor,
    stamps: Tensor,
    epoch: Tensor,
    lists: Tensor,
    counts: Tensor,
    *,
    rows_per_list: int,
    misplaced: Tensor,
    block: int = BLOCK,
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
