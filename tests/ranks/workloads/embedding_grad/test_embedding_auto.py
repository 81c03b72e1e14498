"""Dense or sparse: the limit, what is compared with it, and that all ranks choose alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.embedding_grad import context, dense_mean, prepared, problem, run
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads.embedding_grad import auto, traffic
from tpbench.workloads.embedding_grad.all_to_all import SparseAllToAll
from tpbench.workloads.embedding_grad.auto import calibrate, pays
from tpbench.workloads.embedding_grad.dense import DenseReduceScatter
from tpbench.workloads.embedding_grad.index import CpuIndex, EvenlySpread
from tpbench.workloads.embedding_grad.merge import IndexAddMerge
from tpbench.workloads.embedding_grad.owners import Owners

needs_ranks = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


def test_the_busiest_rank_decides() -> None:
    counts = [[5, 3, 0], [0, 9, 1], [2, 2, 2]]
    assert traffic.leaving(counts) == [3, 1, 4]
    assert traffic.arriving(counts) == [2, 5, 1]
    assert traffic.busiest(counts) == 5
    assert pays(counts, table_rows=30, limit=0.25)  # 5 rows of others, as if 7.5 of 30 were touched
    assert not pays(counts, table_rows=30, limit=0.24)
    assert not pays([[5, 3], [auto.UNKNOWN] * 2], table_rows=1000, limit=float("inf"))
    assert pays([[0, 0], [0, 0]], table_rows=1, limit=0.0)


def choices(here: Rank, unknown: int | None) -> list[str]:
    """What is chosen below, at and above the limit, and where a rank does not know its rows; all of it right."""
    chosen = []
    for limit in (0.0, 0.19, 0.2, 1.0):
        # The fifth part of the table, evenly spread.
        rows = [torch.arange(0, 100, 5, dtype=torch.int32)[None]] * here.world_size
        inputs, wire, exchange = prepared(here, problem(table_rows=100, dtype="float32"), "sparse_auto", rows)
        prepared_auto: Any = exchange
        prepared_auto.limit = limit
        if here.rank == unknown:
            prepared_auto.sparse.index = Unknown()
        right = dense_mean(here, inputs)
        torch.testing.assert_close(run(exchange, wire).double(), right, rtol=1e-6, atol=1e-6)
        assert sum(wire.to_peer) == exchange.formula()[here.rank]
        chosen.append(exchange.facts()["chosen"])
    return chosen


class Unknown:
    """An index of a step whose rows nobody noted."""

    def find(self) -> None:
        return None


@needs_ranks
@pytest.mark.parametrize("unknown", [None, 0, 1])
def test_all_ranks_choose_alike(unknown: int | None) -> None:
    first, second = run_on_ranks(2, choices, unknown)
    assert first == second == (["dense", "dense", "sparse", "sparse"] if unknown is None else ["dense"] * 4)


def without_knowing(here: Rank) -> str:
    _, wire, exchange = prepared(here, problem(), "sparse_all_to_all")
    sparse: Any = exchange
    sparse.index = Unknown()
    try:
        run(exchange, wire)
    except RuntimeError as error:
        return str(error)
    return ""


@needs_ranks
def test_a_sparse_exchange_without_rows_says_what_can() -> None:
    assert all("sparse_auto" in said for said in run_on_ranks(2, without_knowing))


def calibrated(here: Rank) -> tuple[float, bool]:
    """The limit where a reduction takes 10 ms and an exchange 1 ms and 25 ms a whole table; the gradient afterwards."""
    place = context(here)
    inputs, wire, _ = prepared(here, problem(), "dense_reduce_scatter")
    dense = DenseReduceScatter(inputs, wire)
    sparse = SparseAllToAll(inputs, wire, CpuIndex(inputs, pinned=False), IndexAddMerge(inputs))
    index, before = sparse.index, inputs.grad.clone()

    class Pretended(Stopwatch):
        def ms(self, work: Any, restore: Any = None, *, on_host: bool = False) -> float:
            work()
            if sparse.index is index or dense.output is not None:
                return 10.0
            assert sparse.found is not None
            return 1.0 + 25.0 * len(sparse.found.rows) / inputs.problem.table_rows

    limit = calibrate(inputs, dense, sparse, Pretended(place))
    return limit, torch.equal(inputs.grad, before) and sparse.index is index


def test_a_calibration_copies_row_numbers_as_a_step_does() -> None:
    """At a width of 192 what this copy takes was a tenth of the exchange."""
    spread = EvenlySpread(Owners(100, 2), 1, torch.device("cpu"), 20)
    first, second = spread.find(), spread.find()
    assert first.counts == [10, 10] and first.rows.tolist() == [*range(0, 50, 5), *range(50, 100, 5)]
    assert torch.equal(first.rows, second.rows) and first.rows.data_ptr() != second.rows.data_ptr()


@needs_ranks
def test_the_limit_comes_from_measured_times() -> None:
    for limit, untouched in run_on_ranks(2, calibrated):
        assert limit == pytest.approx(9 / 25, rel=0.01)
        assert untouched
