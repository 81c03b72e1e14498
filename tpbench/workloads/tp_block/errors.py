"""Compare a result of the block with the oracle: errors over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.limits import TOLERANCE
from tpbench.workloads.tp_block.oracle import BlockResult, expected_result


@dataclass(frozen=True)
class BlockErrors:
    """Errors of a result against the oracle, over all ranks. A NaN in the result counts as inf."""

    output_error: float
    """Largest ||row - expected|| / ||expected|| of the output."""
    grad_error: float
    """The same of the gradients of the input and of every weight."""
    loss_value: float
    """The result's loss: <upstream gradient, output>."""
    loss_error: float
    """|loss - expected| / max(1, |expected|)."""
    grad_norm: float
    """The norm of the result's gradients of all weights."""
    grad_norm_error: float
    """Relative to the expected norm."""
    worst: str
    """The gradient with the largest error."""

    def complaint(self, dtype: str) -> str | None:
        """Return why the result is wrong, or None."""
        limit = TOLERANCE[dtype]
        checked = {
            "output_error": self.output_error,
            f"grad_error (of {self.worst})": self.grad_error,
            "loss_error": self.loss_error,
            "the relative error of grad_norm": self.grad_norm_error,
        }
        wrong = [f"{name} {value:.3g} is above {limit:.3g}" for name, value in checked.items() if not value <= limit]
        return f"{' and '.join(wrong)} ({dtype})" if wrong else None


def compare(inputs: BlockInputs, result: BlockResult) -> BlockErrors:
    """Compare a result with the oracle's. Collective over the tp group, with the same errors on every rank."""
    expected = expected_result(inputs)
    upstream = inputs.grad(inputs.rank, inputs.size).double()
    sums = torch.tensor(
        [
            _loss(result.output, upstream),
            _loss(expected.output, upstream),
            squared_norm(result.grads, inputs),
            squared_norm(expected.grads, inputs),
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(sums, group=inputs.group)
    loss, expected_loss, square, expected_square = sums.tolist()
    of_gradients = {"input": row_error(result.grad_input, expected.grad_input)}
    of_gradients |= {name: row_error(result.grads.get(name), grad) for name, grad in expected.grads.items()}
    largest = torch.tensor([row_error(result.output, expected.output), *of_gradients.values()], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=inputs.group)
    output_error, *grad_errors = largest.tolist()
    return BlockErrors(
        output_error=output_error,
        grad_error=max(grad_errors),
        loss_value=loss,
        loss_error=_nan_as_inf(abs(loss - expected_loss) / max(1.0, abs(expected_loss))),
        grad_norm=math.sqrt(square),
        grad_norm_error=_nan_as_inf(abs(math.sqrt(square / expected_square) - 1) if expected_square else math.nan),
        worst=list(of_gradients)[grad_errors.index(max(grad_errors))],
    )


def row_error(got: Tensor | None, expected: Tensor) -> float:
    """Return the largest ||row - expected|| / ||expected||: inf for a NaN, a wrong shape or a missing tensor."""
    if got is None or got.shape != expected.shape:
        return math.inf
    norm = torch.linalg.vector_norm
    error = norm(got.double() - expected, dim=-1) / norm(expected, dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    return float(error.nan_to_num(nan=math.inf).max())


def _loss(output: Tensor, upstream: Tensor) -> float:
    return float((output.double() * upstream).sum()) if output.shape == upstream.shape else math.nan


def squared_norm(grads: Mapping[str, Tensor], inputs: BlockInputs) -> float:
    """Return this rank's part of the squared norm of a block's gradients, by the names of their weights.

    The weights of norms are whole on every rank and count on rank 0 only.
    """
    counted = [grad for name, grad in grads.items() if name not in inputs.problem.norms or inputs.rank == 0]
    return math.fsum(float(grad.double().square().sum()) for grad in counted)


def _nan_as_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value
