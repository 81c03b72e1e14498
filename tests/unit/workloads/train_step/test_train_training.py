"""Tokens, gradient norm and clipping of the training loop."""

import hashlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.train_step import CPU, single_context, tiny_problem
from tpbench.workloads.train_step.model.inputs import Batch, micro_batch
from tpbench.workloads.train_step.training.losses import torch_loss
from tpbench.workloads.train_step.training.trainer import FIRST_LOSS_SCALE, TorchTrainer, adamw


def test_tokens_of_a_seed_never_change() -> None:
    batch = micro_batch(tiny_problem(seed=7, vocab=151936, seq_length=512), 1, 0, 1, 2, CPU)
    assert hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest()[:16] == "4cffb1dca1d13336"
    assert torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    assert batch.tokens.min() >= 0 and batch.tokens.max() < 151936
    assert (batch.tokens < 151936 / 8).float().mean() > 0.5  # low tokens are frequent, so the loss can fall


def test_no_two_micro_batches_are_the_same_unless_steps_repeat_them() -> None:
    problem = tiny_problem(accumulate=2)
    sequences = [
        micro_batch(problem, step, micro, replica, 2, CPU).tokens[sample]
        for step in range(3)
        for micro in range(2)
        for replica in range(2)
        for sample in range(problem.batch_size)
    ]
    assert len({tuple(sequence.tolist()) for sequence in sequences}) == len(sequences)
    repeated = tiny_problem(batches=2, accumulate=2)
    tokens = [micro_batch(repeated, step, 1, 0, 2, CPU).tokens for step in range(5)]
    assert torch.equal(tokens[0], tokens[2]) and torch.equal(tokens[1], tokens[3]) and torch.equal(tokens[0], tokens[4])
    assert not torch.equal(tokens[0], tokens[1])


def test_gradients_of_a_larger_norm_are_divided() -> None:
    for largest, divisor in ((1.0, 4.0), (5.0, 1.0), (None, None)):
        model = torch.nn.Linear(4, 1, bias=False)
        trainer = TorchTrainer(tiny_problem(max_grad_norm=largest), model, single_context(), torch_loss)
        model.weight.grad = torch.full_like(model.weight, 2.0)
        assert float(trainer.update()) == pytest.approx(4.0)
        scale = getattr(trainer.optimizer, "grad_scale", None)
        assert (None if scale is None else float(scale)) == (divisor and pytest.approx(divisor))


def test_a_step_whose_gradients_overflow_is_skipped() -> None:
    """The loss scale stays on the device, so the update itself is a kernel that does nothing."""
    model: Any = torch.nn.Linear(2, 1, bias=False)
    model.forward = lambda input_ids, **_: SimpleNamespace(logits=input_ids.float() @ model.weight.t())
    factors = iter([2.0**-4, 1e30, 2.0**-4])  # gradients are in fp16
    problem = tiny_problem(dtype="float16", autocast=True, learning_rate=0.1, weight_decay=0.0)
    trainer = TorchTrainer(
        problem, model, single_context(), lambda logits, labels: logits.float().mean() * next(factors)
    )
    weights, norms = [], []
    for _ in range(3):
        trainer.accumulate([Batch(torch.ones(3, 2), torch.zeros(3))])
        norms.append(float(trainer.update()))
        weights.append(model.weight.detach().clone())
    assert norms == [pytest.approx(math.sqrt(2) / 16), math.inf, pytest.approx(math.sqrt(2) / 16)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert trainer.loss_scale == FIRST_LOSS_SCALE / 2


def test_all_weights_decay() -> None:
    weights = [torch.full((3,), 2.0, requires_grad=True), torch.full((2, 2), 2.0, requires_grad=True)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    adamw(weights, tiny_problem(learning_rate=0.1, weight_decay=0.5), single_context()).step()
    assert all(torch.allclose(weight, torch.tensor(2.0 * (1 - 0.1 * 0.5))) for weight in weights)
