"""Every registered variant that runs here against the oracle, and the choice of sparse_auto on real ranks."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.embedding_grad import (
    DISTRIBUTIONS,
    DTYPES,
    HERE,
    FixedStopwatch,
    dense_mean,
    new_session,
    prepared,
    problem,
    run,
    sent_by_formula,
)
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.measure.session import Verdict
from tpbench.workloads.embedding_grad import WORKLOAD, EmbeddingGrad
from tpbench.workloads.embedding_grad.bench import TOLERANCE
from tpbench.workloads.embedding_grad.exchanges import Exchange, ExchangeContext, by_collectives
from tpbench.workloads.embedding_grad.exchanges.by_collectives import DenseReduceScatter
from tpbench.workloads.embedding_grad.row_operations.search import CpuRowFinder

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")

RANKS = [2, 4] if enough_gpus(4) else [2]

IN_FP32 = 2.0**-20


def cells(name: str) -> list[EmbeddingGrad]:
    """Return problems for a variant: every distribution, dtype and search, and several sizes."""
    found = [problem(distribution=each, dtype=dtype) for each, dtype in zip(DISTRIBUTIONS, DTYPES, strict=True)]
    found += [problem(table_rows=rows, width=width) for rows, width in ((1, 1), (3, 40), (5, 1), (96, 40))]
    found += [problem(tokens=5, accumulate=3), problem(distribution="fixed", tokens=101, accumulate=1)]
    return [*found, problem(search="kernel")] if "search" in WORKLOAD.variants[name].options else found


def kind_of(name: str, exchange: Exchange) -> str:
    """Return the kind of exchange by whose formula the sent bytes are checked."""
    return f"auto_{exchange.chosen}" if name == "sparse_auto" else name


def check_cells(here: Rank, name: str) -> int:
    """Run all cells, some twice: a second run must not see what the first run left."""
    chosen = cells(name)
    for cell in chosen:
        inputs, comm, exchange = prepared(here, cell, name)
        saved = inputs.grad.clone()
        expected, absolute = dense_mean(here, inputs), dense_mean(here, inputs, absolute=True)
        for _ in range(2 if cell.distribution == "uniform" else 1):
            inputs.grad.copy_(saved)
            result = run(exchange, comm).double()
            tolerance = TOLERANCE[cell.dtype] if cell.dtype != "float32" else IN_FP32
            error = (result - expected).norm(dim=1)
            assert (error <= tolerance * absolute.norm(dim=1)).all(), (here.rank, cell, error.max())
            assert sum(comm.sent_bytes) == sent_by_formula(inputs, kind_of(name, exchange))[here.rank], (
                here.rank,
                cell,
            )
    return len(chosen)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", HERE)
def test_results_are_correct_and_sent_bytes_follow_the_formula(name: str, ranks: int) -> None:
    assert len(set(run_on_ranks(ranks, check_cells, name))) == 1


def check_tokens(here: Rank, cell: EmbeddingGrad, name: str, tokens: list[list[int]]) -> None:
    token_rows = [torch.tensor(rows, dtype=torch.int32).view(1, -1) for rows in tokens]
    inputs, comm, exchange = prepared(here, cell, name, token_rows)
    expected = dense_mean(here, inputs)
    result = run(exchange, comm).double()
    error = (result - expected).norm(dim=1)
    assert (error <= IN_FP32 * expected.norm(dim=1)).all(), (here.rank, result, expected)
    assert sum(comm.sent_bytes) == sent_by_formula(inputs, kind_of(name, exchange))[here.rank]


@st.composite
def scattered(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """Draw a number of ranks, rows of a table, and each rank's token rows: any, with duplicates, or none."""
    ranks, table_rows = draw(st.sampled_from(RANKS)), draw(st.integers(1, 40))
    rows = st.lists(st.integers(0, table_rows - 1), max_size=30)
    return ranks, table_rows, [draw(rows) for _ in range(ranks)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=scattered(),
    name=st.sampled_from(HERE),
    width=st.sampled_from((1, 8, 33)),
)
def test_any_rows_are_merged_as_the_dense_mean(case: Any, name: str, width: int) -> None:
    ranks, table_rows, tokens = case
    cell = problem(table_rows=table_rows, width=width, dtype="float32")
    run_on_ranks(ranks, check_tokens, cell, name, tokens)


def test_the_triton_merge_is_rounded_once() -> None:
    """Sums of bf16 rows are in fp32, so that only the result is rounded: half a unit in the last place."""
    for rank, equal in enumerate(run_on_ranks(RANKS[-1], rounded_once)):
        assert equal, rank


def rounded_once(here: Rank) -> bool:
    cell = problem(distribution="fixed", tokens=101, accumulate=1, width=64)
    inputs, comm, exchange = prepared(here, cell, "sparse_all_to_all")
    expected = dense_mean(here, inputs)
    return torch.equal(run(exchange, comm), expected.to(torch.bfloat16))


def session_verdicts(here: Rank, name: str) -> list[Verdict]:
    verdicts = []
    cells = [
        problem(),
        problem(overlap_ms=1.0, other_mib=0.01, transfer_order="between"),
        problem(overlap_ms=1.0, other_mib=0.01),
    ]
    for cell in cells:
        session = new_session(here, cell, name)
        session.step()
        verdicts.append(session.check())
        session.restore()
        session.step()
        session.release()
    return verdicts


@pytest.mark.parametrize("name", HERE)
def test_sessions_agree_on_their_verdict(name: str) -> None:
    first, second = run_on_ranks(2, session_verdicts, name)
    for one, other in zip(first, second, strict=True):
        assert one.wrong is None, one
        assert one.columns == other.columns
        sent, received = one.columns["rank_bytes_sent"], one.columns["rank_bytes_received"]
        assert sent == received[::-1]  # each of two ranks receives what the other sends
    assert all(before.columns["grad_norm"] == after.columns["grad_norm"] for before, after in itertools.pairwise(first))


def choices(here: Rank) -> list[str]:
    """Return the choices below, at and above the limit. Check each result."""
    chosen = []
    for limit in (0.0, 0.19, 0.2, 1.0):
        # A fifth of the table, evenly spaced.
        rows = [torch.arange(0, 100, 5, dtype=torch.int32)[None]] * here.world_size
        inputs, comm, exchange = prepared(here, problem(table_rows=100, dtype="float32"), "sparse_auto", rows)
        sparse_auto: Any = exchange
        sparse_auto.limit = limit
        expected = dense_mean(here, inputs)
        torch.testing.assert_close(run(exchange, comm).double(), expected, rtol=1e-6, atol=1e-6)
        assert sum(comm.sent_bytes) == sent_by_formula(inputs, kind_of("sparse_auto", exchange))[here.rank]
        chosen.append(exchange.columns()["chosen"])
    return chosen


def test_all_ranks_choose_alike() -> None:
    first, second = run_on_ranks(2, choices)
    assert first == second == ["dense", "dense", "sparse", "sparse"]


def calibrated(here: Rank) -> tuple[float, bool]:
    """Calibrate where a reduction takes 10 ms and an exchange 1 ms plus 25 ms a whole table.

    Return the limit, and if the gradient is unchanged.
    """
    cell = problem()
    inputs, comm, _ = prepared(here, cell, "dense_reduce_scatter")
    before = inputs.grad.clone()
    searched: list[int] = []

    class SimulatedStopwatch(FixedStopwatch):
        def ms(self, run: Any, restore: Any = None, *, on_host: bool = False) -> float:
            run()
            dense = getattr(run, "__func__", None) is DenseReduceScatter.reduce
            return 10.0 if dense else 1.0 + 25.0 * searched[-1] / cell.table_rows

    def finder(inputs: Any, tokens: torch.Tensor | None = None) -> CpuRowFinder:
        searched.append(0 if tokens is None else tokens.numel())
        return CpuRowFinder(inputs, tokens=tokens)

    stopwatch: Any = SimulatedStopwatch()
    with mock.patch.object(by_collectives, "row_finder", finder):
        exchange = by_collectives.SparseAuto(cell, ExchangeContext(inputs, comm, stopwatch))
    return exchange.limit, torch.equal(inputs.grad, before)


def test_the_limit_comes_from_measured_times() -> None:
    for limit, unchanged in run_on_ranks(2, calibrated):
        assert limit == pytest.approx(9 / 25, rel=0.01)
        assert unchanged
