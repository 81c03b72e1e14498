"""Every registered variant of the embedding gradient that runs here against the oracle: a new one needs no test of its
own."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.embedding_grad import (
    DISTRIBUTIONS,
    DTYPES,
    HERE,
    context,
    dense_mean,
    prepared,
    problem,
    run,
)
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.measure.session import Verdict
from tpbench.workloads.embedding_grad import WORKLOAD, EmbeddingGrad
from tpbench.workloads.embedding_grad.bench import setup
from tpbench.workloads.embedding_grad.oracle import TOLERANCE

pytestmark = pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs, or none")

IN_FP32 = 2.0**-20


def options(name: str) -> list[dict[str, Any]]:
    """What a variant can be told."""
    takes = WORKLOAD.variants[name].options
    return [{"merge": merge} for merge in ("triton", "index_add")] if "merge" in takes else [{}]


def cells(name: str) -> list[EmbeddingGrad]:
    """What a variant should do: every distribution and dtype, and the options that it takes."""
    found = [problem(distribution=each, **extra) for each in DISTRIBUTIONS for extra in options(name)]
    found += [problem(dtype=dtype, distribution=each) for dtype in DTYPES for each in ("uniform", "one_owner")]
    found += [problem(table_rows=rows, width=width) for rows in (1, 3, 5, 96) for width in (1, 40)]
    found += [
        problem(tokens=5, accumulate=accumulate, pinned=pinned) for accumulate in (1, 3) for pinned in (True, False)
    ]
    found.append(problem(distribution="fixed", tokens=101, accumulate=1))  # every row of every rank
    variant = WORKLOAD.variants[name]
    unused = {name: value for name, value in WORKLOAD.option_defaults.items() if name not in variant.options}
    different = dict.fromkeys(replace(cell, **unused) for cell in found)
    return [cell for cell in different if variant.unsupported_reason(cell, 1) is None]


def everything_right(here: Rank, name: str) -> int:
    """Runs the cells, some twice: what the first run leaves must not show in the second."""
    for cell in cells(name):
        inputs, wire, exchange = prepared(here, cell, name)
        saved, right, sizes = inputs.grad.clone(), dense_mean(here, inputs), dense_mean(here, inputs, of_sizes=True)
        for _ in range(2 if cell.distribution == "uniform" else 1):
            inputs.grad.copy_(saved)
            result = run(exchange, wire).double()
            tolerance = TOLERANCE[cell.dtype] if cell.dtype != "float32" else IN_FP32
            error = (result - right).norm(dim=1)
            assert (error <= tolerance * sizes.norm(dim=1)).all(), (here.rank, cell, error.max())
            assert sum(wire.to_peer) == exchange.formula()[here.rank], (here.rank, cell)
    return len(cells(name))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", HERE)
def test_it_is_right_and_sends_what_the_formula_says(name: str, ranks: int) -> None:
    assert len(set(run_on_ranks(ranks, everything_right, name))) == 1


def right_for(here: Rank, cell: EmbeddingGrad, name: str, tokens: list[list[int]]) -> None:
    given_rows = [torch.tensor(each, dtype=torch.int32).view(1, -1) for each in tokens]
    inputs, wire, exchange = prepared(here, cell, name, given_rows)
    right = dense_mean(here, inputs)
    result = run(exchange, wire).double()
    assert ((result - right).norm(dim=1) <= IN_FP32 * right.norm(dim=1)).all(), (here.rank, result, right)
    assert sum(wire.to_peer) == exchange.formula()[here.rank]
    if name == "sparse_all_to_all":
        others = {row for row in tokens[here.rank] if row // inputs.owners.rows_each != here.rank}
        assert sum(wire.to_peer) == len(others) * (inputs.row_bytes + 4) + 8 * (here.world_size - 1)


@st.composite
def scattered(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """Ranks, rows of a table, and rows that each rank's tokens fall on: any, with duplicates, or none."""
    ranks, table_rows = draw(st.sampled_from((2, 4))), draw(st.integers(1, 40))
    rows = st.lists(st.integers(0, table_rows - 1), max_size=30)
    return ranks, table_rows, [draw(rows) for _ in range(ranks)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=scattered(),
    name=st.sampled_from(HERE),
    merge=st.sampled_from(("triton", "index_add")),
    width=st.sampled_from((1, 8, 33)),
)
def test_any_rows_are_merged_as_the_dense_mean(case: Any, name: str, merge: str, width: int) -> None:
    ranks, table_rows, tokens = case
    cell = problem(table_rows=table_rows, width=width, dtype="float32", merge=merge)
    run_on_ranks(ranks, right_for, cell, name, tokens)


def test_the_triton_merge_is_rounded_once() -> None:
    """fp32 sums of bf16 rows, so that only the result is rounded: half a unit in the last place."""
    for rank, result in enumerate(run_on_ranks(4, one_rounding)):
        assert result, rank


def one_rounding(here: Rank) -> bool:
    cell = problem(distribution="fixed", tokens=101, accumulate=1, width=64)
    inputs, wire, exchange = prepared(here, cell, "sparse_all_to_all")
    right = dense_mean(here, inputs)
    return torch.equal(run(exchange, wire), right.to(torch.bfloat16))


def sessions(here: Rank, name: str) -> list[Verdict]:
    verdicts = []
    for cell in [problem(), problem(overlap_ms=1.0, merge="index_add"), problem(overlap_ms=1.0, transfers="beside")]:
        session = setup(cell, WORKLOAD.variants[name], context(here))
        session.step()
        verdicts.append(session.check())
        session.restore()
        session.step()
        session.release()
    return verdicts


@pytest.mark.parametrize("name", HERE)
def test_sessions_agree_on_their_verdict(name: str) -> None:
    first, second = run_on_ranks(2, sessions, name)
    for one, other in zip(first, second, strict=True):
        assert one.wrong is None, one
        assert one.columns == other.columns
        sent, received = one.columns["rank_bytes_sent"], one.columns["rank_bytes_received"]
        assert sent == received[::-1]  # with two ranks what one sends the other receives
    assert all(before.columns["grad_norm"] == after.columns["grad_norm"] for before, after in itertools.pairwise(first))
