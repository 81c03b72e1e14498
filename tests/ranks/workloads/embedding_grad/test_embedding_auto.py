"""sparse_auto on real ranks: its limit comes from measured times, and all ranks choose alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.embedding_grad import context, dense_mean, prepared, problem, run
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.measure.clock import Stopwatch
from tpbench.workloads.embedding_grad.exchanges.auto import calibrate
from tpbench.workloads.embedding_grad.exchanges.base import DenseReduceScatter
from tpbench.workloads.embedding_grad.exchanges.sparse import SparseAllToAll
from tpbench.workloads.embedding_grad.row_operations.merge import IndexAddMerge
from tpbench.workloads.embedding_grad.row_operations.search import CpuRowFinder

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


class UnknownRows:
    """Row finder that does not know the rows of a step."""

    def find(self) -> None:
        return None


def choices(here: Rank, unknown: int | None) -> list[str]:
    """Return the choices below, at and above the limit; rank `unknown` does not know its rows. Check each result."""
    chosen = []
    for limit in (0.0, 0.19, 0.2, 1.0):
        # A fifth of the table, evenly spaced.
        rows = [torch.arange(0, 100, 5, dtype=torch.int32)[None]] * here.world_size
        inputs, comm, exchange = prepared(here, problem(table_rows=100, dtype="float32"), "sparse_auto", rows)
        sparse_auto: Any = exchange
        sparse_auto.limit = limit
        if here.rank == unknown:
            sparse_auto.sparse.finder = UnknownRows()
        expected = dense_mean(here, inputs)
        torch.testing.assert_close(run(exchange, comm).double(), expected, rtol=1e-6, atol=1e-6)
        assert sum(comm.sent_bytes) == exchange.expected_bytes()[here.rank]
        chosen.append(exchange.columns()["chosen"])
    return chosen


@pytest.mark.parametrize("unknown", [None, 0, 1])
def test_all_ranks_choose_alike(unknown: int | None) -> None:
    first, second = run_on_ranks(2, choices, unknown)
    assert first == second == (["dense", "dense", "sparse", "sparse"] if unknown is None else ["dense"] * 4)


def error_without_rows(here: Rank) -> str:
    _, comm, exchange = prepared(here, problem(merge="index_add"), "sparse_all_to_all")
    sparse: Any = exchange
    sparse.finder = UnknownRows()
    try:
        run(exchange, comm)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_sparse_exchange_without_rows_names_the_alternative() -> None:
    assert all("sparse_auto" in message for message in run_on_ranks(2, error_without_rows))


def calibrated(here: Rank) -> tuple[float, bool]:
    """Calibrate where a reduction takes 10 ms and an exchange 1 ms plus 25 ms a whole table.

    Return the limit, and if the gradient is unchanged.
    """
    inputs, comm, _ = prepared(here, problem(), "dense_reduce_scatter")
    dense = DenseReduceScatter(inputs, comm)
    sparse = SparseAllToAll(inputs, comm, CpuRowFinder(inputs, pinned=False), IndexAddMerge(inputs))
    finder, before = sparse.finder, inputs.grad.clone()

    class SimulatedStopwatch(Stopwatch):
        def ms(self, work: Any, restore: Any = None, *, on_host: bool = False) -> float:
            work()
            if sparse.finder is finder or dense.output is not None:
                return 10.0
            assert sparse.touched is not None
            return 1.0 + 25.0 * len(sparse.touched.rows) / inputs.problem.table_rows

    limit = calibrate(inputs, dense, sparse, SimulatedStopwatch(context(here)))
    return limit, torch.equal(inputs.grad, before) and sparse.finder is finder


def test_the_limit_comes_from_measured_times() -> None:
    for limit, unchanged in run_on_ranks(2, calibrated):
        assert limit == pytest.approx(9 / 25, rel=0.01)
        assert unchanged
