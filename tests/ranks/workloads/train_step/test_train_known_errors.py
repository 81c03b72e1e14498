"""Errors for which tools of this kind are known, one test each. Each error gives numbers that look like training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.train_step import (
    SHARDED,
    batches_here,
    compare,
    largest_error,
    mesh_context,
    prepared,
    tiny_problem,
    train,
    train_alone,
)

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


def gradient_errors(here: Rank, name: str, fields: dict[str, Any]) -> dict[str, float]:
    """Return the relative error of each parameter's gradient after one backward pass."""
    problem, context = tiny_problem(**fields), mesh_context(here, 2)
    right = train_alone(problem, context, 1).gradients
    actual = train(prepared(name, problem, context), problem, context, 1).gradients
    return {each: largest_error({each: actual[each]}, {each: right[each]})[0] for each in right}


@pytest.mark.parametrize("name", SHARDED)
def test_1_norms_of_queries_and_keys_get_all_heads_gradients(name: str) -> None:
    """Without a plan, a rank's weight gets the gradient of its own heads, which is 50 to 73% off."""
    errors = run_on_ranks(2, gradient_errors, name, {})[0]
    of_norms = [error for each, error in errors.items() if "q_norm" in each or "k_norm" in each]
    assert len(of_norms) == 4 and max(of_norms) < 1e-3


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("fields", [{}, {"vocab_parallel": False}, {"tied": True}], ids=str)
def test_2_a_sharded_head_returns_the_whole_gradient(name: str, fields: dict[str, Any]) -> None:
    """A sharded head without an all-reduce in its backward pass gives wrong gradients to every layer below it."""
    errors = run_on_ranks(2, gradient_errors, name, fields)[0]
    assert max(errors["model.norm.weight"], errors["model.embed_tokens.weight"]) < 1e-3


@pytest.mark.parametrize(
    ("name", "fields"), [("autotp", {"zero_stage": 0}), ("autotp", {}), ("fsdp_dtensor", {}), ("dtensor_tp", {})]
)
def test_3_the_norm_sums_over_shards(name: str, fields: dict[str, Any]) -> None:
    """A shard that is not marked as one counts on one rank only."""
    assert run_on_ranks(2, compare, name, 2, fields, 1)[0]["norm"] < 1e-4


@pytest.mark.parametrize("name", SHARDED)
def test_4_accumulation_divides_the_loss_once(name: str) -> None:
    errors = run_on_ranks(2, compare, name, 2, {"accumulate": 3}, 1)[0]
    assert errors["loss"] < 1e-5
    assert errors["gradient"][0] < 1e-3


def largest_updates(here: Rank, name: str) -> list[float]:
    """Return the largest change of a weight in each of three steps."""
    problem, context = tiny_problem(accumulate=2, weight_decay=0.0), mesh_context(here, 2)
    trainer = prepared(name, problem, context)
    changes = []
    for step in range(3):
        before = [each.detach().clone() for each in trainer.model.parameters()]
        trainer.accumulate(batches_here(problem, context, step))
        trainer.update()
        pairs = zip(trainer.model.parameters(), before, strict=True)
        changes.append(max(float((after.detach() - each).abs().max()) for after, each in pairs))
    return changes


@pytest.mark.parametrize("name", SHARDED)
def test_5_every_step_is_one_update(name: str) -> None:
    """AdamW changes a weight by about the learning rate. Without an update nothing changes, two updates change twice
    that."""
    for change in run_on_ranks(2, largest_updates, name)[0]:
        assert 0.005 < change < 0.02


def errors_with_clipping(here: Rank, name: str) -> tuple[float, float]:
    """Return the errors of the weights against one process that clips, and against one that does not.

    A constant factor on the gradients does not change AdamW's updates. Norms that vary from step to step do.
    """
    problem, context = tiny_problem(max_grad_norm=0.1), mesh_context(here, 2)
    actual = train(prepared(name, problem, context), problem, context, 4).weights
    clipped = train_alone(problem, context, 4).weights
    unclipped = train_alone(replace(problem, max_grad_norm=None), context, 4).weights
    return largest_error(actual, clipped)[0], largest_error(actual, unclipped)[0]


@pytest.mark.parametrize("name", SHARDED)
def test_6_gradients_are_clipped(name: str) -> None:
    from_clipped, from_unclipped = run_on_ranks(2, errors_with_clipping, name)[0]
    assert from_clipped < 3e-3 < 3e-2 < from_unclipped
