"""Float64 oracle: the mean of all ranks' gradients in this rank's rows, recomputed without any exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.collectives import gather_objects
from tpbench.workloads.differences import Differences, malformed, place_of
from tpbench.workloads.embedding_grad.inputs import CHUNK, EmbeddingGradInputs

TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-20}
"""Largest allowed error of a row of the mean, by norm, relative to that row.

A sum over W ranks that is rounded after each addition errs by about sqrt(W) times half a unit in the last place (2^-9,
2^-12, 2^-25). The tolerances allow 8, 8 and 32 times that half unit.
"""


@dataclass(frozen=True)
class EmbeddingGradErrors:
    """Distance of a result from the oracle, over all ranks. A NaN makes an error infinite."""

    grad_error: float
    """Largest ||row - expected|| / ||expected||. A row that no rank touched must be exactly zero."""
    grad_norm: float
    """Norm of the oracle's mean gradient."""
    place: str = ""
    """Where the first rank with a wrong row differs. Empty: no row is wrong."""

    def complaint(self, dtype: str) -> str | None:
        """Return why the result is wrong, or None."""
        if self.grad_error <= TOLERANCE[dtype]:
            return None
        place = f": {self.place}" if self.place else ""
        return f"grad_error {self.grad_error:.3g} is above {TOLERANCE[dtype]:.3g} ({dtype}){place}"


def compare(inputs: EmbeddingGradInputs, result: Tensor) -> EmbeddingGradErrors:
    """Compare this rank's slice of the mean with the oracle. Collective."""
    partition, first_row = inputs.partition, inputs.partition.first_row(inputs.rank)
    worst, squares = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    shape, differences = tuple(inputs.own_slice.shape), Differences()
    place = malformed("the mean gradient", result, shape, inputs.grad.dtype, inputs.device)
    if place is not None:
        worst.fill_(math.inf)
        place = f"rank {inputs.rank}: {place}"
    else:
        limit, width = TOLERANCE[inputs.problem.dtype], inputs.problem.width
        step = max(1, CHUNK[inputs.device.type] // width)
        for start in range(0, partition.rows_per_rank, step):
            stop = min(start + step, partition.rows_per_rank)
            expected = mean_gradient(inputs, first_row + start, first_row + stop)
            norm = expected.norm(dim=1)
            error = (result[start:stop].double() - expected).norm(dim=1) / norm
            # 0 / 0: no rank touched the row, and it is zero.
            untouched = (norm == 0) & (result[start:stop] == 0).all(dim=1)
            error = torch.where(untouched, 0.0, error.nan_to_num(nan=math.inf))
            worst = torch.maximum(worst, error.max().cpu())
            squares += expected.square().sum().cpu()
            # A row above the limit has an element above this one.
            above = ~((result[start:stop].double() - expected).abs() <= limit * norm[:, None] / math.sqrt(width))
            differences.add(result[start:stop], expected, ~(error <= limit)[:, None] & above, start)
        if differences.count:
            place = place_of(inputs.rank, "the mean gradient", **vars(differences))
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=inputs.group)
    dist.all_reduce(squares, dist.ReduceOp.SUM, group=inputs.group)
    places = gather_objects(place, inputs.group)
    return EmbeddingGradErrors(float(worst), float(squares.sqrt()), next(filter(None, places), ""))


def mean_gradient(inputs: EmbeddingGradInputs, start: int, stop: int) -> Tensor:
    """Return rows [start, stop) of the mean over ranks, (stop - start, width) float64, with zeros in the padding."""
    total = torch.zeros(stop - start, inputs.problem.width, dtype=torch.float64, device=inputs.device)
    for rank, touched in enumerate(inputs.touched):
        low, high = torch.searchsorted(touched, torch.tensor([start, stop])).tolist()
        rows = touched[low:high]
        # The rows of one rank are distinct, so that this addition has no race.
        total[(rows - start).to(inputs.device)] += inputs.gradient_rows(rank, rows).double()
    return total / len(inputs.touched)
