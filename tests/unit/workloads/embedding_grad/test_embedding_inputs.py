"""Inputs: the same whatever the world size, and spread as their distribution says."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.embedding_grad import DISTRIBUTIONS, context, problem
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.owners import Owners
from tpbench.workloads.embedding_grad.problem import expected_density


@given(table_rows=st.integers(1, 10_000), ranks=st.integers(1, 64))
def test_owners_share_the_table(table_rows: int, ranks: int) -> None:
    owners = Owners(table_rows, ranks)
    assert sum(map(owners.held, range(ranks))) == table_rows <= owners.padded_rows < table_rows + ranks
    assert owners.bounds == [owners.first(rank) for rank in range(ranks)] + [owners.padded_rows]


@settings(max_examples=30, deadline=None)
@given(
    distribution=st.sampled_from([each for each in DISTRIBUTIONS if each != "one_owner"]),
    seed=st.integers(0, 2**31 - 1),
    rank=st.integers(0, 1),
)
def test_a_ranks_part_is_the_same_in_any_world(distribution: str, seed: int, rank: int) -> None:
    cell = problem(distribution=distribution, seed=seed)
    two, four = (Inputs(cell, context(rank=rank, ranks=ranks)) for ranks in (2, 4))
    assert torch.equal(two.steps, four.steps)
    assert torch.equal(two.grad[:101], four.grad[:101])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_gradient_is_where_tokens_fell(distribution: str) -> None:
    inputs = Inputs(problem(distribution=distribution, tokens=40), context(rank=1, ranks=4))
    rows = inputs.steps.unique().tolist()
    assert (inputs.grad != 0).any(dim=1).nonzero()[:, 0].tolist() == rows
    assert all(0 <= row < 101 for row in rows)
    assert sum(inputs.counts[1]) == len(rows)
    assert inputs.merged_rows == [
        len({row for each in inputs.touched for row in each.tolist() if row // 26 == owner}) for owner in range(4)
    ]


def test_distributions_do_what_their_names_say() -> None:
    size = {"table_rows": 5000, "tokens": 2000, "accumulate": 2}
    made = {each: Inputs(problem(distribution=each, **size), context(rank=1, ranks=4)) for each in DISTRIBUTIONS}
    uniform = 5000 * (1 - (1 - 1 / 5000) ** 4000)
    assert len(made["uniform"].touched[0]) == pytest.approx(uniform, rel=0.03)
    assert made["uniform"].density == pytest.approx(expected_density(vars(problem(**size))), rel=0.03)
    assert made["one_owner"].merged_rows[1:] == [0, 0, 0]
    assert made["one_rank"].touched[1].numel() == made["none"].touched[0].numel() == 0
    assert len(made["one_rank"].touched[0]) > 0
    assert len(made["zipf"].touched[0]) < 0.5 * len(made["uniform"].touched[0])
    counts = made["zipf"].steps.flatten().bincount()
    assert counts.max() > 0.05 * 4000  # the most frequent word: log 2 / log N
    assert 0.05 < made["bigram"].duplicate_rate < 0.5
    assert (made["bigram"].steps[:, 0] == 4999).all()  # a step's first token has no token before it


@pytest.mark.parametrize(("tokens", "duplicates"), [(100, 0.0), (100, 0.75), (101, 0.5), (60, 0.99)])
def test_a_fixed_duplicate_rate_is_exact(tokens: int, duplicates: float) -> None:
    cell = problem(distribution="fixed", tokens=tokens, accumulate=1, duplicates=duplicates)
    inputs = Inputs(cell, context(rank=1))
    distinct = round(tokens * (1 - duplicates))
    assert [len(each) for each in inputs.touched] == [distinct] * 2
    assert inputs.duplicate_rate == pytest.approx(1 - distinct / tokens)
    assert expected_density(vars(cell)) == pytest.approx(inputs.density, rel=1e-2)
    assert not torch.equal(inputs.touched[0], inputs.touched[1]) or distinct == 101


def test_they_stay_what_they_were() -> None:
    """Rows measured yesterday and on other machines are of the same problem only as long as this holds."""
    digest = hashlib.sha256()
    for distribution in DISTRIBUTIONS:
        inputs = Inputs(problem(distribution=distribution, tokens=50, seed=7), context(rank=1))
        digest.update(inputs.steps.numpy().tobytes() + inputs.grad.view(torch.int16).numpy().tobytes())
    assert digest.hexdigest()[:16] == "92195848735b0611"


@pytest.mark.parametrize(
    ("fields", "place", "said"),
    [
        ({}, (2, 2), "tp_size=2 must be 1"),
        ({}, (1, 1), "dp_size=1 must be at least 2"),
        ({"duplicates": 0.5}, (1, 2), "needs distribution=fixed"),
        ({"distribution": "fixed", "tokens": 51}, (1, 2), "make 102 distinct rows, not between 1 and table_rows=101"),
        ({"distribution": "fixed", "duplicates": 1.0}, (1, 2), "make 0 distinct rows"),
    ],
)
def test_what_cannot_be_is_said(fields: dict[str, object], place: tuple[int, int], said: str) -> None:
    assert any(said in each for each in problem(**fields).check(*place))
    assert not problem().check(1, 2)
