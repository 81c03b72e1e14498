"""Chunks of rows: within the workspace, equal, complete, and never an error."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpbench.kernels.linear.chunks import chunks_of


@given(st.integers(0, 300), st.integers(1, 4), st.integers(1, 10**6), st.floats(1e-9, 4.0))
def test_chunks_cover_all_rows_once_within_the_workspace(part: int, shards: int, row_bytes: int, gib: float) -> None:
    chunks = chunks_of(part * shards, shards, row_bytes, gib)
    assert chunks.most * row_bytes <= max(gib * 2**30, shards * row_bytes) and chunks.most % shards == 0
    covered = [row for index in range(len(chunks)) for row in range(part)[chunks.part(index)]]
    assert covered == list(range(part))
    rows = torch.arange(part * shards)
    taken = [chunks.take(rows, index) for index in range(len(chunks))]
    assert torch.equal(chunks.in_rows(torch.cat([rows[:0], *taken])), rows)


@pytest.mark.parametrize(
    ("rows", "columns", "gib", "most"),
    [(8192, 131072, 0.25, 1024), (5000, 131072, 0.5, 1792), (7, 131072, 9, 7), (8192, 2**20, "auto", 1024)],
)
def test_chunks_are_of_about_equal_size(rows: int, columns: int, gib: Any, most: int) -> None:
    assert chunks_of(rows, 1, columns * 2, gib).most == most
