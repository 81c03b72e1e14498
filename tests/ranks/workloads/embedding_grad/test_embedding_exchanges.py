"""Every registered variant that runs here against the oracle."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.embedding_grad import (
    DISTRIBUTIONS,
    DTYPES,
    HERE,
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
from tpbench.workloads.embedding_grad.bench import compare

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")

RANKS = [2, 4] if enough_gpus(4) else [2]

IN_FP32 = 2.0**-20


def cells(name: str) -> list[EmbeddingGrad]:
    """Return problems for a variant: every distribution, dtype and search, and several sizes."""
    found = [problem(distribution=each, dtype=dtype) for each, dtype in zip(DISTRIBUTIONS, DTYPES, strict=True)]
    found += [problem(table_rows=rows, width=width) for rows, width in ((1, 1), (3, 40), (5, 1), (96, 40))]
    found += [problem(tokens=5, accumulate=3), problem(distribution="fixed", tokens=101, accumulate=1)]
    # Some of many short rows cancel to almost nothing, or exactly to zero.
    found += [problem(distribution="fixed", table_rows=4001, width=1, tokens=4001, accumulate=1)]
    return [*found, problem(search="kernel")] if "search" in WORKLOAD.variants[name].options else found


def check_cells(here: Rank, name: str) -> int:
    """Run all cells, some twice: a second run must not see what the first run left."""
    chosen = cells(name)
    for cell in chosen:
        inputs, comm, exchange = prepared(here, cell, name)
        saved = inputs.grad.clone()
        for _ in range(2 if cell.distribution == "uniform" else 1):
            inputs.grad.copy_(saved)
            assert compare(inputs, run(exchange, comm)).wrong is None, (here.rank, cell)
            assert sum(comm.sent_bytes) == sent_by_formula(inputs, name)[here.rank], (here.rank, cell)
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
    assert sum(comm.sent_bytes) == sent_by_formula(inputs, name)[here.rank]


@st.composite
def scattered(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """Draw a number of ranks, rows of a table, and each rank's token rows: any, with duplicates, or none."""
    ranks, table_rows = draw(st.sampled_from(RANKS)), draw(st.integers(1, 40))
    rows = st.lists(st.integers(0, table_rows - 1), max_size=30)
    return ranks, table_rows, [draw(rows) for _ in range(ranks)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=scattered(), name=st.sampled_from(HERE), width=st.sampled_from((1, 8, 33)))
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
