"""The oracle on one process that has the tokens of two ranks."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.embedding_grad import context, problem
from tests.support.lone_rank import lone_rank
from tpbench.workloads.embedding_grad import bench
from tpbench.workloads.embedding_grad.bench import compare, mean_gradient
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lone_rank(monkeypatch, 1)
    monkeypatch.setattr(bench, "gather_objects", lambda value, group: [value])


def inputs_of(rank: int = 0, **fields: Any) -> EmbeddingGradInputs:
    return EmbeddingGradInputs(problem(dtype="float32", **fields), context(rank=rank))


def whole_mean(**fields: Any) -> Tensor:
    """Return the mean of both ranks' gradients, in float64."""
    return (inputs_of(0, **fields).grad.double() + inputs_of(1, **fields).grad.double()) / 2


def right(inputs: EmbeddingGradInputs) -> Tensor:
    return inputs.slice_of(whole_mean()).float()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_mean_is_that_of_both_ranks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, mean = inputs_of(rank), whole_mean()
    rows = len(mean)
    assert torch.equal(mean_gradient(inputs, 0, rows)[0], mean)
    assert torch.equal(mean_gradient(inputs, 3, 40)[0], mean[3:40])
    found = compare(inputs, right(inputs))
    assert found.columns["grad_error"] < 2**-23
    assert found.columns["grad_norm"] == pytest.approx(float(inputs.slice_of(mean).norm()))
    for elements in (1, 12, 12 * 5, 10**6):
        monkeypatch.setattr(bench, "CHUNK", {"cpu": elements})
        assert compare(inputs, right(inputs)) == found


def test_the_error_is_that_of_the_worst_row() -> None:
    inputs = inputs_of(1)
    result = right(inputs)
    first, second = (result.norm(dim=1) > 0).nonzero()[:2, 0].tolist()
    result[first] *= 1.25
    result[second] *= 1.5
    errors = compare(inputs, result)
    assert errors.columns["grad_error"] == pytest.approx(0.5, rel=1e-5)
    assert re.search(
        rf": rank 0: \d+ of \d+ elements of the mean gradient differ, the first at \[{first}, ", str(errors.wrong)
    )
    assert "rank 0: the mean gradient is (" in str(compare(inputs, result[:-1]).wrong)


def test_planted_errors_are_infinite() -> None:
    inputs = inputs_of()
    clean = right(inputs)
    untouched = int((clean == 0).all(dim=1).nonzero()[0])
    touched = int((clean != 0).any(dim=1).nonzero()[0])
    for row, value in ((untouched, 1e-30), (untouched, math.nan), (touched, math.nan), (touched, math.inf)):
        spoiled = clean.clone()
        spoiled[row, 2] = value
        assert compare(inputs, spoiled).columns["grad_error"] > 1e300
    assert compare(inputs, clean.double()).columns["grad_error"] == math.inf
    assert compare(inputs, clean[:-1]).columns["grad_error"] == math.inf
