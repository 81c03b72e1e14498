"""The float64 oracle: the correct losses and gradient, and the errors of a variant's output.

It computes the definitions (log-softmax, then the sum) in float64, on the same shards as the variants, with plain
all-reduces of one number per row. It works on chunks of rows: the reference gradient exists for one chunk at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.workloads.entropy_loss.inputs import Shard
from tpbench.workloads.entropy_loss.limits import tolerances
from tpbench.workloads.entropy_loss.output import Output
from tpbench.workloads.entropy_loss.problem import EntropyLoss
from tpbench.workloads.oracle_arithmetic import bits, relative_error, weighted
from tpbench.workloads.two_logit_losses import TWO_LOGIT_LOSSES

_CHUNK = {"cpu": 2**17, "cuda": 2**21}
"""Elements in a chunk of rows. About ten float64 temporaries of it exist at once: 160 MiB on a GPU. On a CPU they fit
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
        loss_tolerance, grad_tolerance = tolerances(problem)
        wrong = []
        if not self.loss_error <= loss_tolerance:
            wrong.append(f"loss_error {self.loss_error:.3g} is above {loss_tolerance:.3g}")
        if not self.grad_error <= grad_tolerance:
            wrong.append(self.grad_mismatch or f"grad_error {self.grad_error:.3g} is above {grad_tolerance:.3g}")
        return f"{' and '.join(wrong)} ({problem.dtype})" if wrong else None


class Oracle:
    """The correct result of one problem. Construction and comparison are collective over the shard's group."""

    def __init__(self, problem: EntropyLoss, shard: Shard) -> None:
        self.problem, self.shard = problem, shard
        self.scale, self.target_scale = problem.logits_scale, problem.logits_scale / problem.temperature
        self.log_z, self.log_z_target = self._log_z(shard.logits, self.scale), None
        if not problem.from_labels:
            self.log_z_target = self._log_z(shard.target, self.target_scale)
        self.counts = torch.ones(shard.tokens, dtype=torch.bool, device=shard.device)
        if problem.from_labels:
            self.counts = (shard.target >= 0) & (shard.target < shard.vocab_size)
        self.row_loss = self._row_loss()
        """(tokens,) float64, 0 where a row does not count."""
        self.inverse_count = 1.0 / max(1, int(self.counts.sum()))
        self.loss = float(self.row_loss.sum()) * self.inverse_count

    def gradient(self, rows: slice) -> Tensor:
        """Return the gradient of the mean loss by the local logits of some rows, in float64."""
        log_p = self._log_p(rows)
        p = log_p.exp()
        if self.problem.from_labels:
            label, held = self._label(rows)
            grad = p
            grad[held, label[held]] -= 1.0
        elif TWO_LOGIT_LOSSES[self.problem.loss].weight == "p":
            value = TWO_LOGIT_LOSSES[self.problem.loss].value(log_p, self._log_q(rows))
            grad = weighted(p, value - self.row_loss[rows, None])
        else:
            grad = p - self._log_q(rows).exp()
        grad *= self.scale * self.inverse_count
        return grad.masked_fill_(~self.counts[rows, None], 0.0)

    def compare(self, output: Output) -> Errors:
        """Return the errors of `output`."""
        loss_errors = [relative_error(output.loss, torch.tensor(self.loss, device=self.shard.device))]
        if output.row_loss is not None:
            loss_errors.append(relative_error(output.row_loss, self.row_loss))
        worst = self._reduce(torch.stack([each.max() for each in loss_errors if each.numel()]).max(), dist.ReduceOp.MAX)
        return Errors(
            self.loss,
            float(worst),
            self._grad_error(output.grad, output.grad_factor),
            self._identical(output),
            self._mismatch(output.grad),
        )

    def _mismatch(self, grad: Tensor) -> str:
        got, right = (f"{tuple(each.shape)} {each.dtype}" for each in (grad, self.shard.logits))
        return "" if got == right else f"the gradient is {got}, and the local logits are {right}"

    def _grad_error(self, grad: Tensor, factor: Tensor | float) -> float:
        # Columns: squared error, squared right gradient, elements that are not zero.
        sums = torch.full((self.shard.tokens, 3), math.inf, dtype=torch.float64, device=self.shard.device)
        if not self._mismatch(grad):
            slack = torch.finfo(grad.dtype).smallest_normal * torch.finfo(grad.dtype).eps / 2
            for rows in self._chunks():
                got, right = grad[rows].double() * factor, self.gradient(rows)
                error = ((got - right).abs_() - slack).clamp_(min=0.0)
                sums[rows] = torch.stack((error.square_().sum(-1), right.square_().sum(-1), (got != 0).sum(-1)), dim=1)
        error, right, nonzero = self._reduce(sums, dist.ReduceOp.SUM).unbind(1)
        relative = torch.where(right > 0, (error / right).sqrt(), torch.where(nonzero > 0, math.inf, 0.0))
        relative = torch.where(error.isnan() | right.isnan() | relative.isnan(), math.inf, relative)
        return float(relative.max())

    def _identical(self, output: Output) -> bool:
        device = self.shard.device
        both = torch.cat([bits(output.loss, 1, device), bits(output.row_loss, self.shard.tokens, device)])
        lowest, highest = (self._reduce(both.clone(), op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
        return torch.equal(lowest, highest)

    def _chunks(self) -> Iterator[slice]:
        step = max(1, _CHUNK[self.shard.device.type] // self.shard.logits.shape[1])
        return (slice(first, min(first + step, self.shard.tokens)) for first in range(0, self.shard.tokens, step))

    def _reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.shard.group is not None:
            dist.all_reduce(values, op, group=self.shard.group)
        return values

    def _log_z(self, logits: Tensor, scale: float) -> Tensor:
        """Return log(sum(exp(scale * logits))) over the whole vocabulary, (tokens,)."""
        highest, total = (torch.empty(len(logits), dtype=torch.float64, device=logits.device) for _ in range(2))
        for rows in self._chunks():
            highest[rows] = logits[rows].amax(-1).double() * scale
        # The maximum of a NaN is undefined in a reduction. An infinity in its place becomes a NaN again below.
        highest = self._reduce(highest.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf), dist.ReduceOp.MAX)
        for rows in self._chunks():
            total[rows] = (logits[rows].double() * scale - highest[rows, None]).exp().sum(-1)
        return highest + self._reduce(total, dist.ReduceOp.SUM).log()

    def _log_p(self, rows: slice) -> Tensor:
        return self.shard.logits[rows].double() * self.scale - self.log_z[rows, None]

    def _log_q(self, rows: slice) -> Tensor:
        assert self.log_z_target is not None
        return self.shard.target[rows].double() * self.target_scale - self.log_z_target[rows, None]

    def _label(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the labels' local columns, and a mask of the rows whose label this rank holds."""
        label = self.shard.target[rows] - self.shard.vocab_start
        return label, self.counts[rows] & (label >= 0) & (label < self.shard.logits.shape[1])

    def _row_loss(self) -> Tensor:
        row_loss = torch.zeros(self.shard.tokens, dtype=torch.float64, device=self.shard.device)
        for rows in self._chunks():
            log_p = self._log_p(rows)
            if self.problem.from_labels:
                label, held = self._label(rows)
                row_loss[rows][held] = -log_p[held, label[held]]
                continue
            log_q, loss = self._log_q(rows), TWO_LOGIT_LOSSES[self.problem.loss]
            weight = (log_p if loss.weight == "p" else log_q).exp()
            row_loss[rows] = weighted(weight, loss.value(log_p, log_q)).sum(-1)
        return self._reduce(row_loss, dist.ReduceOp.SUM)
