"""The estimated memory of a rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.train_step import tiny_problem
from tpbench.workloads.train_step.estimates import estimate_memory, parameters


def test_memory_of_parameters_by_variant() -> None:
    problem = tiny_problem(dtype="bfloat16", vocab=96)
    count, embedding = parameters(problem), 96 * 32
    whole_model = estimate_memory(problem, "ddp", 1, 2)
    assert (whole_model.model, whole_model.gradients, whole_model.optimizer) == (2 * count, 2 * count, 4 * count)
    assert whole_model.total == 8 * count + whole_model.activations  # DDP's gradients are views of its buckets
    sharded = estimate_memory(problem, "fsdp_dtensor", 2, 2)
    assert sharded.total == sharded.model + sharded.optimizer + max(sharded.gradients, sharded.activations)
    kept = estimate_memory(tiny_problem(dtype="bfloat16", vocab=96, accumulate=2), "fsdp_dtensor", 2, 2)
    assert kept.total == kept.model + kept.gradients + kept.optimizer + kept.activations
    assert sharded.model == sharded.gradients == pytest.approx(2 * count / 4, abs=2)
    assert estimate_memory(problem, "autotp", 2, 1).model == pytest.approx(2 * count / 2, abs=2)
    gathered = replace(problem, vocab_parallel=False)  # AutoTP then leaves the embedding whole
    assert estimate_memory(gathered, "autotp", 2, 1).model == pytest.approx(
        2 * (embedding + (count - embedding) / 2), abs=2
    )


def test_zeros_buffers_replace_the_logits_if_they_are_larger() -> None:
    """On GPUs, ZeRO allocates two buffers with the first gradient. Their size does not depend on the model."""
    buffers = 2 * 500_000_000 * 2
    problem = tiny_problem(dtype="bfloat16", vocab=96)
    there, none = (estimate_memory(problem, "autotp", 2, 1, on_gpus=each).activations for each in (True, False))
    logits = problem.tokens * 96 // 2 * (2 * 2 + 2 * 4)
    assert there == none - logits + buffers
    assert estimate_memory(tiny_problem(dtype="bfloat16", vocab=96, zero_stage=0), "autotp", 2, 1).activations == none
    many = tiny_problem(dtype="bfloat16", vocab=2**20, seq_length=2**12)
    assert estimate_memory(many, "autotp", 2, 1) == estimate_memory(many, "autotp", 2, 1, on_gpus=False)
    # With two micro-batches, the buffers exist beside the second one's logits.
    twice = tiny_problem(dtype="bfloat16", vocab=96, accumulate=2)
    assert estimate_memory(twice, "autotp", 2, 1).activations == there + logits
