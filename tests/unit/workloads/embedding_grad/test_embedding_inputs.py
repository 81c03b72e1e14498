"""Inputs: the same for every world size, and distributed as named."""

import hashlib
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.embedding_grad import DISTRIBUTIONS, context, problem
from tpbench.workloads.embedding_grad.inputs import (
    VOCABULARY,
    EmbeddingGradInputs,
    bigram_rows,
    text_tokens,
    token_rows,
)


@settings(max_examples=30)
@given(distribution=st.sampled_from(DISTRIBUTIONS), seed=st.integers(0, 2**31 - 1), rank=st.integers(0, 1))
def test_inputs_of_a_rank_do_not_depend_on_the_world_size(distribution: str, seed: int, rank: int) -> None:
    cell = problem(distribution=distribution, seed=seed)
    two, four = (EmbeddingGradInputs(cell, context(rank=rank, ranks=ranks)) for ranks in (2, 4))
    assert torch.equal(two.own_tokens, four.own_tokens)
    assert torch.equal(two.grad[:101], four.grad[:101])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_gradient_has_values_in_touched_rows_only(distribution: str) -> None:
    inputs = EmbeddingGradInputs(problem(distribution=distribution, tokens=40), context(rank=1, ranks=4))
    rows = inputs.own_tokens.unique().tolist()
    assert (inputs.grad != 0).any(dim=1).nonzero()[:, 0].tolist() == rows
    assert all(0 <= row < 101 for row in rows)
    assert sum(inputs.counts[1]) == len(rows)
    assert inputs.merged_rows == [
        len({row for each in inputs.touched for row in each.tolist() if row // 26 == owner}) for owner in range(4)
    ]


def test_fixed_rows_are_distinct_and_differ_between_ranks() -> None:
    cell = problem(distribution="fixed", tokens=60, accumulate=1)
    inputs = EmbeddingGradInputs(cell, context(rank=1))
    assert [len(each) for each in inputs.touched] == [60] * 2
    assert inputs.density == pytest.approx(60 / 101, rel=1e-2)
    assert not torch.equal(inputs.touched[0], inputs.touched[1])


def test_inputs_stay_the_same_across_versions() -> None:
    """Only then rows measured earlier, or on other machines, describe the same problem."""
    digest = hashlib.sha256()
    for distribution in DISTRIBUTIONS:
        inputs = EmbeddingGradInputs(problem(distribution=distribution, tokens=50, seed=7), context(rank=1))
        digest.update(inputs.own_tokens.numpy().tobytes() + inputs.grad.view(torch.int16).numpy().tobytes())
    assert digest.hexdigest()[:16] == "3047524f2b09cb26"


@pytest.mark.parametrize(
    ("fields", "place", "said"),
    [
        ({}, (2, 2), "tp_size=2 must be 1"),
        ({}, (1, 1), "dp_size=1 must be at least 2"),
        ({"distribution": "fixed", "tokens": 51}, (1, 2), "tokens=51 x accumulate=2 are more than table_rows=101"),
        ({"index": "early", "overlap_ms": 1.0}, (1, 2), "index=early needs overlap_ms and distribution=zipf_bigram"),
        ({"index": "late", "distribution": "zipf_bigram"}, (1, 2), "index=late needs overlap_ms"),
        ({"other_mib": 1.0}, (1, 2), "other_mib=1.0 needs overlap_ms"),
        ({"transfer_order": "last", "overlap_ms": 1.0}, (1, 2), "transfer_order=last needs other_mib"),
    ],
)
def test_impossible_problems_get_a_message(fields: dict[str, object], place: tuple[int, int], said: str) -> None:
    assert any(said in each for each in problem(**fields).check(*place))
    assert not problem().check(1, 2)


def record_hash(tokens: list[int], table_rows: int) -> list[int]:
    """The speed record's `get_bigram_hash`, on Python's integers, wrapped as int32."""
    wrapped = [((36313 * b + 2**31) % 2**32 - 2**31, (27191 * a + 2**31) % 2**32 - 2**31) for a, b in pairwise(tokens)]
    return [table_rows - 1, *((x ^ y) % (table_rows - 1) for x, y in wrapped)]


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20),
    table_rows=st.sampled_from((2, 101, 251520, 377280)),
)
def test_bigrams_are_hashed_as_in_the_record(tokens: list[int], table_rows: int) -> None:
    rows = bigram_rows(torch.tensor([tokens], dtype=torch.int32), table_rows)
    assert rows.tolist() == [record_hash(tokens, table_rows)]


def test_a_zipf_text_has_the_frequencies_of_its_ranks() -> None:
    cell = problem(distribution="zipf_bigram", table_rows=377_280, tokens=49_152)
    text = text_tokens(cell, 0)
    assert text.shape == (2, 49_152) and int(text.min()) >= 0 and int(text.max()) < VOCABULARY
    counts = text.flatten().bincount() / text.numel()
    for token in (0, 1, 9):
        assert float(counts[token]) == pytest.approx(math.log1p(1 / (token + 1)) / math.log(VOCABULARY + 1), rel=0.1)
    own, other = (token_rows(cell, rank) for rank in range(2))
    assert own.tolist() == [record_hash(step, 377_280) for step in text.tolist()]
    assert not torch.equal(own, other)
    digest = hashlib.sha256(own.numpy().tobytes()).hexdigest()  # rows measured earlier describe the same problem
    assert digest[:16] == "306f47186e4979c7"
