"""Tokens of the train step."""

from __future__ import annotations

import hashlib

import torch

from tests.support.train_step import CPU, tiny_problem
from tpbench.workloads.train_step.model.inputs import micro_batch


def test_tokens_of_a_seed_never_change() -> None:
    batch = micro_batch(tiny_problem(seed=7, vocab=151936, seq_length=512), 1, 0, 1, 2, CPU)
    assert hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest()[:16] == "4cffb1dca1d13336"
    assert torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    assert batch.tokens.min() >= 0 and batch.tokens.max() < 151936
    assert (batch.tokens < 151936 / 8).float().mean() > 0.5  # low tokens are frequent, so the loss can fall


def test_no_two_micro_batches_are_the_same() -> None:
    """Unless `batches` says so, no step trains on what it has seen."""
    problem = tiny_problem(accumulate=2)
    sequences = [
        micro_batch(problem, step, micro, replica, 2, CPU).tokens[sample]
        for step in range(3)
        for micro in range(2)
        for replica in range(2)
        for sample in range(problem.batch_size)
    ]
    assert len({tuple(each.tolist()) for each in sequences}) == len(sequences)


def test_steps_repeat_a_number_of_batches() -> None:
    problem = tiny_problem(batches=2, accumulate=2)
    tokens = [micro_batch(problem, step, 1, 0, 2, CPU).tokens for step in range(5)]
    assert torch.equal(tokens[0], tokens[2]) and torch.equal(tokens[1], tokens[3]) and torch.equal(tokens[0], tokens[4])
    assert not torch.equal(tokens[0], tokens[1])
