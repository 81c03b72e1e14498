"""The float64 oracle: the mean of every rank's gradient in this rank's rows, made anew without any exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.workloads.embedding_grad.inputs import CHUNK, Inputs

TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-20}
"""Of a row of the mean, by norm. A sum over W ranks that is rounded after each addition errs by some sqrt(W) times half
a unit in the last place (2^-9, 2^-12, 2^-25); these admit 8 and 32 of those."""


class LostRows(RuntimeError):
    """The gradient has rows that the exchange was not told of: it would lose them."""


@dataclass(frozen=True)
class Errors:
    """How far a result is from the oracle, over all ranks. A NaN makes an error inf."""

    grad_error: float
    """Largest ||row - right|| / ||right||; a row that nobody touched must be exactly zero."""
    grad_norm: float
    """Norm of the right mean gradient."""

    def complaint(self, dtype: str) -> str | None:
        """Why the result is not right, or None."""
        if self.grad_error <= TOLERANCE[dtype]:
            return None
        return f"grad_error {self.grad_error:.3g} is above {TOLERANCE[dtype]:.3g} ({dtype})"


def compare(inputs: Inputs, result: Tensor) -> Errors:
    """Collective."""
    owners, first = inputs.owners, inputs.owners.first(inputs.rank)
    worst, squares = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    if result.shape != inputs.own.shape or result.dtype != inputs.grad.dtype:
        worst.fill_(math.inf)
    else:
        step = max(1, CHUNK[inputs.device.type] // inputs.problem.width)
        for start in range(0, owners.rows_each, step):
            stop = min(start + step, owners.rows_each)
            right = mean_gradient(inputs, first + start, first + stop)
            norm = right.norm(dim=1)
            error = (result[start:stop].double() - right).norm(dim=1) / norm
            # 0 / 0: nobody touched the row, and it is zero.
            untouched = (norm == 0) & (result[start:stop] == 0).all(dim=1)
            error = torch.where(untouched, 0.0, error.nan_to_num(nan=math.inf))
            worst = torch.maximum(worst, error.max().cpu())
            squares += right.square().sum().cpu()
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=inputs.group)
    dist.all_reduce(squares, dist.ReduceOp.SUM, group=inputs.group)
    return Errors(float(worst), float(squares.sqrt()))


def mean_gradient(inputs: Inputs, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of the mean over ranks, (stop - start, width) float64; zeros in the padding."""
    total = torch.zeros(stop - start, inputs.problem.width, dtype=torch.float64, device=inputs.device)
    for rank, touched in enumerate(inputs.touched):
        low, high = torch.searchsorted(touched, torch.tensor([start, stop])).tolist()
        rows = touched[low:high]
        # No row twice within a rank, so that this is no race.
        total[(rows - start).to(inputs.device)] += inputs.values(rank, rows).double()
    return total / len(inputs.touched)


def lost_rows(grad: Tensor, known: Tensor) -> Tensor:
    """Rows of the gradient that are not zero and not among the known, ascending."""
    step = max(1, CHUNK[grad.device.type] // grad.shape[1])
    touched = torch.cat([(each != 0).any(dim=1) for each in grad.split(step)])
    touched[known.long()] = False
    return touched.nonzero()[:, 0]


def demand_no_lost_rows(inputs: Inputs, known: Tensor | None) -> None:
    """Raise LostRows on every rank if any has a touched row that its exchange did not know of. Collective.

    `inputs.grad` must be as it was before the exchange.
    """
    lost = torch.empty(0, dtype=torch.int64) if known is None else lost_rows(inputs.grad, known)
    everyone = [torch.empty(2, dtype=torch.int64) for _ in inputs.touched]
    example = int(lost[0]) if len(lost) else -1
    dist.all_gather(everyone, torch.tensor([len(lost), example]), group=inputs.group)
    for rank, (count, row) in enumerate(each.tolist() for each in everyone):
        if count:
            raise LostRows(f"rank {rank} has {count} touched rows outside the mask, the first is row {row}")
