"""The floor is a lower bound: no committed row is faster."""

from __future__ import annotations

import pytest

from tests.support.command import ROOT
from tpbench.measure.measured_columns import cost_columns
from tpbench.measure.session import Costs
from tpbench.results.read import load, plain_rows
from tpbench.workloads.embedding_grad.bench import unavoidable_bytes


def test_unavoidable_bytes_are_of_the_busiest_rank() -> None:
    counts = [[5, 2], [1, 3]]  # rank 0 reads 7 rows and writes 5; rank 1 reads 4 and writes 4
    assert unavoidable_bytes(counts, [5, 4], row_bytes=10) == (120, 20)


def test_transfers_beside_memory_traffic_count_once() -> None:
    for wire_ms, floor_ms in ((0.5, 2.0), (3.0, 3.0)):
        costs = Costs(bytes_moved=2 * 10**6, bytes_communicated=0, wire_ms=wire_ms, wire_beside_memory=True)
        assert cost_columns(costs, copy_gb_per_s=1.0)["floor_ms"] == pytest.approx(floor_ms)


def test_no_committed_row_is_faster_than_its_floor() -> None:
    rows = plain_rows(load(ROOT / "outputs/reference", workload="embedding_grad", status="ok"))
    with_floor = [row for row in rows if row["floor_ms"] is not None]
    assert {"dense_reduce_scatter", "sparse_all_to_all", "sparse_symmetric"} <= {row["variant"] for row in with_floor}
    for row in with_floor:
        assert row["floor_ms"] <= row["device_ms"], (row["variant"], row["density"])
