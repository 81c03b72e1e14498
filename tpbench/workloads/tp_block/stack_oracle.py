"""The float64 oracle of a stack: train it by the plain formulas, and return its losses and gradient norms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.workloads.tp_block.errors import squared_norm
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.oracle import ForwardPass

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01
"""Arguments of AdamW beside the learning rate: torch's defaults."""


@dataclass(frozen=True)
class Trajectory:
    """Losses and gradient norms of the training steps, in order."""

    losses: list[float]
    grad_norms: list[float]

    def errors(self, expected: Trajectory) -> dict[str, float]:
        """Return the largest relative errors of a step's loss and gradient norm. A NaN counts as inf."""
        return {
            "loss_error": _largest_error(self.losses, expected.losses),
            "grad_error": _largest_error(self.grad_norms, expected.grad_norms),
        }


def expected_trajectory(inputs: BlockInputs, steps: int) -> Trajectory:
    """Train for `steps` steps in float64. Collective over the tp group, with the same result on every rank.

    After each step the weights are rounded to the dtype in which a variant stores them: in bf16 a small update of a
    large weight is lost, and others become larger.
    """
    problem = inputs.problem
    layers = [
        {name: each.double().requires_grad_() for name, each in inputs.weights_of(inputs.rank, inputs.size, at).items()}
        for at in range(problem.layers)
    ]
    x, target = inputs.x(0, 1).double(), inputs.target(0, 1).double()
    weights = [weight for layer in layers for weight in layer.values()]
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    losses, grad_norms = [], []
    for step in range(1, steps + 1):
        y = x
        for layer in layers:
            y = ForwardPass(inputs, layer).run(y)
        loss = (y - target).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        grad_norms.append(_grad_norm(inputs, layers))
        with torch.no_grad():
            for weight, (mean, square) in zip(weights, moments, strict=True):
                _update(weight, mean, square, step, problem.learning_rate)
                weight.copy_(weight.to(inputs.dtype))
    return Trajectory(losses, grad_norms)


def _update(weight: Tensor, mean: Tensor, square: Tensor, step: int, learning_rate: float) -> None:
    """One step of AdamW. The decay is decoupled from the gradient."""
    grad = weight.grad
    assert grad is not None
    first, second = BETAS
    mean.mul_(first).add_((1 - first) * grad)
    square.mul_(second).add_((1 - second) * grad**2)
    weight.mul_(1 - learning_rate * WEIGHT_DECAY)
    weight.sub_(learning_rate * mean / (1 - first**step) / ((square / (1 - second**step)).sqrt() + EPS))
    weight.grad = None


def _grad_norm(inputs: BlockInputs, layers: list[dict[str, Tensor]]) -> float:
    """The norm of the gradients of all layers' weights, over all ranks."""
    grads = ({name: each.grad for name, each in layer.items() if each.grad is not None} for layer in layers)
    square = torch.tensor(math.fsum(squared_norm(each, inputs) for each in grads), dtype=torch.float64)
    dist.all_reduce(square, group=inputs.group)
    return math.sqrt(square)


def _largest_error(got: list[float], expected: list[float]) -> float:
    errors = [abs(one - other) / max(abs(other), 1e-30) for one, other in zip(got, expected, strict=True)]
    return math.inf if any(map(math.isnan, errors)) else max(errors)
