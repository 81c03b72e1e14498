"""Chunks of rows: within the workspace, equal, complete, and never an error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpbench.kernels.linear.chunks import chunks_of


@given(st.integers(0, 300), st.integers(1, 4), st.integers(1, 10**6), st.floats(1e-9, 4.0))
def test_chunks_cover_all_rows_once_within_the_workspace(part: int, shards: int, row_bytes: int, gib: float) -> None:
    chunks = chunks_of(part * shards, shards, row_bytes, gib)
    assert chunks.most * row_bytes <= max(gib * 2**30, shards * row_bytes) and chunks.most % shards == 0
    covered = [row for index in range(len(chunks)) for row in range(part)[chunks.local(index)]]
    assert covered == list(range(part))
    rows = torch.arange(part * shards)
    again = torch.zeros_like(rows)
    for index in range(len(chunks)):
        taken = chunks.take(rows, index)
        assert taken.is_contiguous()
        if shards == 1:
            again[chunks.local(index)] = taken
        chunks.put(again, taken, index)
    assert torch.equal(again, rows)
    if shards > 1 and part:
        again.zero_()
        chunks.put_all(again, chunks.in_order(rows))
        assert torch.equal(again, rows)


@pytest.mark.parametrize(
    ("rows", "gib", "most"),
    [(8192, 0.5, 2048), (8192, 0.25, 1024), (8192, 100.0, 8192), (5000, 0.5, 1792), (7, 9, 7), (8200, 2.1, 8200)],
)
def test_chunks_are_of_about_equal_size(rows: int, gib: float, most: int) -> None:
    assert chunks_of(rows, 1, 131072 * 2, gib).most == most


@pytest.mark.parametrize(("columns", "most"), [(65536, 4096), (131072, 2048), (2**20, 1024), (1000, 8192)])
def test_a_workspace_of_its_own_choice(columns: int, most: int) -> None:
    assert chunks_of(8192, 1, columns * 2, "auto").most == most
