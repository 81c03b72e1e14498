"""The float64 oracle: the correct losses and gradient, and the errors of a variant's output."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.workloads.entropy_loss.inputs import Output, Shard
from tpbench.workloads.entropy_loss.problem import EntropyLoss
from tpbench.workloads.losses.oracle import LossOracle, complaint
from tpbench.workloads.sizes import ITEM_BYTES

LOSS_TOLERANCE = 2.0**-16
"""Tolerance of losses that are computed in fp32 from logits of any dtype. Errors of fp32 sums of 10^5 terms and of fp32
logarithms are about 2^-20. A count that is off by one in 4096 rows is an error of 2^-12."""

GRADIENT_TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-15}
"""Tolerance of a row's gradient, by norm. Rounding an exact gradient to bf16 or fp16 has an error of at most 2^-8 or
2^-11, half a unit in the last place. Four times that allows one more rounding (for example of an upstream scale) and
the arithmetic before it. In fp32 that arithmetic, exponentials and long sums, has an error of about 2^-20."""

LOGITS_DTYPE_TOLERANCE = {
    "bfloat16": (2.0**-5, 2.0**-4),
    "float16": (2.0**-8, 2.0**-6),
    "float32": (LOSS_TOLERANCE, GRADIENT_TOLERANCE["float32"]),
}
"""Tolerances (loss, gradient) for compute_dtype=logits. torch then rounds log p itself to the dtype. For 2^17 columns
log p is near 12, so its absolute error in bf16 is up to 2^-5. The relative error of p = exp(log p) is as large, and
that of a difference of two such numbers is larger. Measured with torch 2.11 on a GPU, 2^15 and 2^17 columns: loss
1.7e-2 (bf16) and 2.2e-3 (fp16), gradient 2.8e-2 (bf16). In fp16 at such sizes, gradients of the two-logit losses are
about 1e-9, smaller than the rounding of subnormal numbers (error 0.07 to 0.34). A user would need a loss scale, and the
oracle reports them as wrong."""


def error_limits(problem: EntropyLoss) -> dict[str, float]:
    """Return the largest error of a correct row, by column."""
    loss, gradient = LOSS_TOLERANCE, GRADIENT_TOLERANCE[problem.dtype]
    if problem.compute_dtype == "logits":
        loss, gradient = LOGITS_DTYPE_TOLERANCE[problem.dtype]
    return {"loss_error": loss, "grad_error": gradient}


def bytes_moved(problem: EntropyLoss, tp_size: int) -> int:
    """Return the bytes of a rank with the most columns: each input is read once, the gradient is written once."""
    columns = -(-problem.vocab // tp_size)
    matrix = problem.tokens * columns * ITEM_BYTES[problem.dtype]
    return 2 * matrix + 8 * problem.tokens if problem.from_labels else 3 * matrix


BLOCK = {"cpu": 2**17, "cuda": 2**21}
"""Elements of a block of rows. About ten float64 temporaries of it exist at once: 160 MiB on a GPU. On a CPU they fit
into the cache."""


@dataclass(frozen=True)
class Errors:
    """Errors of an output, over all ranks that share the vocabulary. A NaN makes an error inf."""

    loss_value: float
    """The correct loss, in float64."""
    loss_error: float
    """Largest |loss - right| / max(1, |right|), over the rows and their mean."""
    grad_error: float
    """Largest ||grad - right|| / ||right|| of a row of the whole vocabulary. Errors below half the smallest number of
    the dtype do not count: a variant cannot avoid underflow. A row whose gradient is zero must be exactly zero."""
    loss_identical: bool
    """True if all ranks have the same bits in the loss and in the rows' losses."""
    grad_mismatch: str = ""
    """Complaint about a gradient of this rank whose shape or dtype is not that of the logits. Empty if it is."""

    def complaint(self, problem: EntropyLoss) -> str | None:
        """Return why the output is wrong, or None if it is correct."""
        return complaint(self, error_limits(problem), problem.dtype, {"grad_error": self.grad_mismatch})


class Oracle(LossOracle):
    """The correct result of one problem. Construction and comparison are collective over the shard's group."""

    shard: Shard

    def __init__(self, problem: EntropyLoss, shard: Shard) -> None:
        labels = shard.target if problem.from_labels else None
        super().__init__(problem, shard, labels, problem.logits_scale)
        self.log_z, self.log_z_target, self.row_loss = (
            torch.zeros(problem.tokens, dtype=torch.float64, device=shard.device) for _ in range(3)
        )
        for rows in self.blocks(BLOCK):
            self.log_z[rows] = self.log_sum_exp(self._x(rows))
            if labels is None:
                self.log_z_target[rows] = self.log_sum_exp(self._t(rows))
            self.row_loss[rows] = self.row_losses(*self._log_probabilities(rows), rows)
        self.loss = float(self.row_loss.sum()) * self.inverse_count

    def gradient(self, rows: slice) -> Tensor:
        """Return the gradient of the mean loss by the local logits of some rows, in float64."""
        return self.gradient_of_mean(*self._log_probabilities(rows), self.row_loss[rows], rows)

    def compare(self, output: Output) -> Errors:
        """Return the errors of `output`."""
        right = torch.tensor(self.loss, device=self.shard.device)
        return Errors(
            self.loss,
            self.loss_error(output.loss, output.row_loss, right, self.row_loss),
            self._grad_error(output.grad, output.grad_factor),
            self.identical([(output.loss, 1), (output.row_loss, self.shard.tokens)]),
            self._mismatch(output.grad),
        )

    def _x(self, rows: slice) -> Tensor:
        x: Tensor = self.shard.logits[rows].double() * self.scale
        return x

    def _t(self, rows: slice) -> Tensor:
        t: Tensor = self.shard.target[rows].double() * (self.scale / self.problem.temperature)
        return t

    def _log_probabilities(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return log p of the local logits and, for a loss against target logits, log q."""
        log_p = self._x(rows) - self.log_z[rows, None]
        return log_p, None if self.labels is not None else self._t(rows) - self.log_z_target[rows, None]

    def _mismatch(self, grad: Tensor) -> str:
        got, right = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (grad, self.shard.logits))
        return "" if got == right else f"the gradient is {got}, and the local logits are {right}"

    def _grad_error(self, grad: Tensor, factor: Tensor | float) -> float:
        # Columns: squared error, squared right gradient, elements that are not zero.
        sums = torch.full((self.shard.tokens, 3), math.inf, dtype=torch.float64, device=self.shard.device)
        if not self._mismatch(grad):
            slack = torch.finfo(grad.dtype).smallest_normal * torch.finfo(grad.dtype).eps / 2
            for rows in self.blocks(BLOCK):
                got, right = grad[rows].double() * factor, self.gradient(rows)
                error = ((got - right).abs_() - slack).clamp_(min=0.0)
                sums[rows] = torch.stack((error.square_().sum(-1), right.square_().sum(-1), (got != 0).sum(-1)), dim=1)
        error, right, nonzero = self.reduce(sums, dist.ReduceOp.SUM).unbind(1)
        relative = torch.where(right > 0, (error / right).sqrt(), torch.where(nonzero > 0, math.inf, 0.0))
        relative = torch.where(error.isnan() | right.isnan() | relative.isnan(), math.inf, relative)
        return float(relative.max())
