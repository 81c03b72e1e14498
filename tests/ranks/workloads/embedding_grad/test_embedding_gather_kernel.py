"""The gather kernel alone: the same as index_select, with blocks of any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpbench.workloads.embedding_grad.row_operations.gather_kernel import BLOCKS, gather_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25, deadline=None)
@given(
    table_rows=st.integers(1, 70),
    width=st.integers(1, 40),
    ids=st.sampled_from((torch.int32, torch.int64)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    blocks=st.sampled_from((BLOCKS, (4, 16))),
    data=st.data(),
)
def test_the_given_rows_are_copied(
    table_rows: int, width: int, ids: torch.dtype, dtype: torch.dtype, blocks: tuple[int, int], data: st.DataObject
) -> None:
    rows = torch.tensor(data.draw(st.lists(st.integers(0, table_rows - 1), max_size=100)), dtype=ids)
    table = torch.randn(table_rows, width).to(dtype)
    output = torch.full((len(rows) + 1, width), 7.0, dtype=dtype, device=DEVICE)
    gather_rows(table.to(DEVICE), rows.to(DEVICE), output[:-1], blocks=blocks)
    assert torch.equal(output[:-1].cpu(), table[rows.long()])
    assert (output[-1] == 7).all()  # nothing is written after the last row


@pytest.mark.parametrize("row", [-1, 3, 2**31 - 1])
def test_a_row_outside_the_table_is_zero(row: int) -> None:
    table, rows = torch.ones(3, 5, device=DEVICE), torch.tensor([1, row], dtype=torch.int32, device=DEVICE)
    assert gather_rows(table, rows, table.new_empty(2, 5)).tolist() == [[1.0] * 5, [0.0] * 5]
