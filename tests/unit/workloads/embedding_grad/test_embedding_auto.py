"""Choice between dense and sparse from the counts of rows, and the row numbers of a calibration."""

from __future__ import annotations

import torch

from tpbench.workloads.embedding_grad.exchanges import auto
from tpbench.workloads.embedding_grad.exchanges.auto import sparse_is_faster
from tpbench.workloads.embedding_grad.row_operations.search import EvenlySpacedRows
from tpbench.workloads.embedding_grad.tokens import RowPartition
from tpbench.workloads.embedding_grad.traffic import formulas


def test_the_busiest_rank_decides() -> None:
    counts = [[5, 3, 0], [0, 9, 1], [2, 2, 2]]
    assert formulas.leaving(counts) == [3, 1, 4]
    assert formulas.arriving(counts) == [2, 5, 1]
    assert formulas.busiest(counts) == 5
    assert sparse_is_faster(counts, table_rows=30, limit=0.25)  # 5 rows of others, as if 7.5 of 30 were touched
    assert not sparse_is_faster(counts, table_rows=30, limit=0.24)
    assert not sparse_is_faster([[5, 3], [auto.UNKNOWN] * 2], table_rows=1000, limit=float("inf"))
    assert sparse_is_faster([[0, 0], [0, 0]], table_rows=1, limit=0.0)


def test_a_calibration_copies_row_numbers_as_a_step_does() -> None:
    """At a width of 192 this copy took a tenth of the exchange's time."""
    finder = EvenlySpacedRows(RowPartition(100, 2), 1, torch.device("cpu"), 20)
    first, second = finder.find(), finder.find()
    assert first.counts == [10, 10] and first.rows.tolist() == [*range(0, 50, 5), *range(50, 100, 5)]
    assert torch.equal(first.rows, second.rows) and first.rows.data_ptr() != second.rows.data_ptr()
