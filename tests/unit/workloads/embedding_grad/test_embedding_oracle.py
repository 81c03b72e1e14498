"""The oracle on one process that has the tokens of two ranks."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.embedding_grad import context, problem
from tpbench.workloads.embedding_grad.bench import compare, mean_gradient
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs


def inputs_of(rank: int = 0, **fields: Any) -> EmbeddingGradInputs:
    return EmbeddingGradInputs(problem(dtype="float32", **fields), context(rank=rank))


def whole_mean(**fields: Any) -> Tensor:
    """Return the mean of both ranks' gradients, in float64."""
    return (inputs_of(0, **fields).grad.double() + inputs_of(1, **fields).grad.double()) / 2


@pytest.mark.parametrize("fields", [{}, {"table_rows": 300_001, "width": 33}])  # one block of rows, and several
@pytest.mark.parametrize("rank", [0, 1])
def test_the_mean_is_that_of_both_ranks(rank: int, fields: dict[str, int]) -> None:
    inputs, mean = inputs_of(rank, **fields), whole_mean(**fields)
    assert torch.equal(mean_gradient(inputs, 0, len(mean))[0], mean)
    assert torch.equal(mean_gradient(inputs, 3, 40)[0], mean[3:40])
    verdict = compare(inputs, inputs.slice_of(mean).float())
    assert verdict.wrong is None and verdict.columns["grad_error"] < 2**-23
    assert verdict.columns["grad_norm"] == pytest.approx(float(inputs.slice_of(mean).norm()))


def test_the_error_is_that_of_the_worst_row() -> None:
    inputs = inputs_of(1)
    result = inputs.slice_of(whole_mean()).float()
    first, second = (result.norm(dim=1) > 0).nonzero()[:2, 0].tolist()
    result[first] *= 1.25
    result[second] *= 1.5
    verdict = compare(inputs, result)
    assert verdict.columns["grad_error"] == pytest.approx(0.5, rel=1e-5)
    assert re.search(
        rf"rank 0: \d+ of \d+ elements of the mean gradient differ by more than rounding, most at \[{second}, ",
        verdict.wrong or "",
    )


def test_planted_errors_are_infinite() -> None:
    inputs = inputs_of()
    clean = inputs.slice_of(whole_mean()).float()
    untouched = int((clean == 0).all(dim=1).nonzero()[0])
    touched = int((clean != 0).any(dim=1).nonzero()[0])
    for row, value in ((untouched, 1e-30), (untouched, math.nan), (touched, math.nan), (touched, math.inf)):
        spoiled = clean.clone()
        spoiled[row, 2] = value
        assert compare(inputs, spoiled).columns["grad_error"] > 1e300
    for malformed in (clean.double(), clean[:-1]):
        assert compare(inputs, malformed).columns["grad_error"] == math.inf
