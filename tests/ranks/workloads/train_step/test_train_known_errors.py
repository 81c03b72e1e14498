"""Errors that tools of this kind are known for, a test each: every one makes a number that looks like training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.train_step import alone, compare, context, prepared, problem, replica, train, worst
from tpbench.workloads.train_step.batches import micro_batch
from tpbench.workloads.train_step.speed import throughput

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")

SHARDED = ("fsdp_dtensor", "autotp")


def gradients(here: Rank, name: str, fields: dict[str, Any]) -> dict[str, float]:
    """Each parameter's relative error after one step's backward pass."""
    cell, place = problem(**fields), context(here, 2)
    right = alone(cell, place, 1).gradients
    got = train(prepared(name, cell, place), cell, place, 1).gradients
    return {each: worst({each: got[each]}, {each: right[each]})[0] for each in right}


@pytest.mark.parametrize("name", SHARDED)
def test_1_norms_of_queries_and_keys_get_all_heads_gradients(name: str) -> None:
    """Without a plan a rank's weight has the gradient of its own heads: 50 to 73% off."""
    errors = run_on_ranks(2, gradients, name, {})[0]
    of_norms = [error for each, error in errors.items() if "q_norm" in each or "k_norm" in each]
    assert len(of_norms) == 4 and max(of_norms) < 1e-3


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("fields", [{}, {"vocab_parallel": False}, {"tied": True}], ids=str)
def test_2_a_sharded_head_hands_back_the_whole_gradient(name: str, fields: dict[str, Any]) -> None:
    """A sharded head without an all-reduce in its backward pass spoils every layer below it."""
    errors = run_on_ranks(2, gradients, name, fields)[0]
    assert max(errors["model.norm.weight"], errors["model.embed_tokens.weight"]) < 1e-3


@pytest.mark.parametrize("stage", [0, 1])
def test_3_the_norm_adds_up_over_shards(stage: int) -> None:
    """Shards that are not marked as such count on one rank only."""
    assert run_on_ranks(2, compare, "autotp", 2, {"zero_stage": stage}, 1)[0]["norm"] < 1e-4
    assert run_on_ranks(2, compare, "fsdp_dtensor", 2, {}, 1)[0]["norm"] < 1e-4


@pytest.mark.parametrize("name", SHARDED)
def test_4_accumulation_divides_the_loss_once(name: str) -> None:
    found = run_on_ranks(2, compare, name, 2, {"accumulate": 3}, 1)[0]
    assert found["loss"] < 1e-5
    assert found["gradient"][0] < 1e-3


def updates(here: Rank, name: str) -> list[float]:
    """How far each of three steps moved the weights."""
    cell, place = problem(accumulate=2, weight_decay=0.0), context(here, 2)
    trainer = prepared(name, cell, place)
    moved = []
    for step in range(3):
        before = [each.detach().clone() for each in trainer.model.parameters()]
        trainer.accumulate(replica(cell, place, step))
        trainer.update()
        pairs = zip(trainer.model.parameters(), before, strict=True)
        moved.append(max(float((after.detach() - each).abs().max()) for after, each in pairs))
    return moved


@pytest.mark.parametrize("name", SHARDED)
def test_5_every_step_is_one_update(name: str) -> None:
    """AdamW moves by about the learning rate: not at all in a step without an update, twice that with two."""
    for moved in run_on_ranks(2, updates, name)[0]:
        assert 0.005 < moved < 0.02


def clipped(here: Rank, name: str) -> tuple[float, float]:
    """How far the weights are from one process that clips, and from one that does not. The norms vary from step to
    step, which AdamW, indifferent to a constant factor, remembers."""
    cell, place = problem(max_grad_norm=0.1), context(here, 2)
    got = train(prepared(name, cell, place), cell, place, 4).weights
    right = alone(cell, place, 4).weights
    without = alone(replace(cell, max_grad_norm=None), place, 4).weights
    return worst(got, right)[0], worst(got, without)[0]


@pytest.mark.parametrize("name", SHARDED)
def test_6_gradients_are_clipped(name: str) -> None:
    from_clipped, from_unclipped = run_on_ranks(2, clipped, name)[0]
    assert from_clipped < 3e-3 < 3e-2 < from_unclipped


def rates(here: Rank) -> dict[str, Any]:
    place = replace(context(here, 1), dp_size=2, world_size=4)
    return throughput(problem(accumulate=3), place, {"time_ms": 500.0, "flops": 10**12})


def test_7_throughput_counts_replicas_and_accumulation() -> None:
    found = run_on_ranks(2, rates)[0]
    assert found["samples_per_s"] == 2 * 3 * 2 / 0.5
    assert found["tokens_per_s"] == 16 * found["samples_per_s"]
    assert found["tokens_per_s_per_gpu"] == found["tokens_per_s"] / 4
    assert found["tflops_per_gpu"] == 2.0


def test_8_no_two_micro_batches_are_the_same() -> None:
    cell = problem(accumulate=2)
    seen = [
        micro_batch(cell, step, micro, replica, 2, torch.device("cpu")).tokens[sample]
        for step in range(3)
        for micro in range(2)
        for replica in range(2)
        for sample in range(cell.batch_size)
    ]
    assert len({tuple(each.tolist()) for each in seen}) == len(seen)
