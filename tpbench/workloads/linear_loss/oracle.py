"""The float64 oracle: losses, entropies and both gradients in blocks of rows, and the errors of a variant's output.

Logits are exact here, while variants round them to their dtype. So tolerances are those of rounded logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.workloads.linear_loss.inputs import Output, Shard
from tpbench.workloads.linear_loss.problem import LinearLoss
from tpbench.workloads.losses.oracle import LossOracle, complaint, relative_error, weighted
from tpbench.workloads.sizes import ITEM_BYTES

LOSS_TOLERANCE = {"bfloat16": 2.0**-5, "float16": 2.0**-8, "float32": 2.0**-14}
"""Tolerance of a row's loss, relative to the larger of it and 1. A logit of 8 in bf16 has a rounding error of 2^-6."""

ENTROPY_TOLERANCE = {"bfloat16": 2.0**-3, "float16": 2.0**-6, "float32": 2.0**-12}
"""Tolerance of a row's entropy, likewise. A logit's error counts p * |log p + entropy| times, which may exceed 1.
Measured in bf16 on a GPU, with 2^17 columns and logits rounded once: 0.043."""

GRADIENT_TOLERANCE = {"bfloat16": 2.0**-4, "float16": 2.0**-7, "float32": 2.0**-12}
"""Tolerance of the gradients of a row of hidden states and of the weight, by norm. A probability's relative error is
the absolute error of its logit. The logits' gradient, partial sums over ranks and the result are rounded too."""


def gradient_factor(problem: LinearLoss) -> int:
    """Return the factor on the gradients' tolerance: 2 if a logit's error counts more than once.

    A teacher's logits are rounded too, and errors count |log p - log q| times. Measured for reverse_kl in bf16, with
    2^17 columns and several signs of the inputs: 0.051 to 0.070. With 2^12 columns rounded logits alone, all else
    exact, give 0.038 to 0.047. In the gradient of an entropy, errors count |log p + entropy| times.
    """
    entropy_has_gradient = problem.loss == "logprob" and problem.entropy
    return 2 if entropy_has_gradient or not problem.from_labels else 1


def error_limits(problem: LinearLoss) -> dict[str, float]:
    """Return the largest error of a correct row, by column."""
    limits = {"loss_error": LOSS_TOLERANCE[problem.dtype]}
    if problem.entropy:
        limits["entropy_error"] = ENTROPY_TOLERANCE[problem.dtype]
    if problem.trains:
        gradient = GRADIENT_TOLERANCE[problem.dtype] * gradient_factor(problem)
        limits |= dict.fromkeys(("grad_error", "hidden_grad_error", "weight_grad_error"), gradient)
    return limits


def bytes_moved(problem: LinearLoss, tp_size: int) -> int:
    """Return the bytes of a rank with the most columns.

    In mode=train each logit is read once and its gradient is written once. A gradient needs the maximum and the sum of
    its whole row, so the logits have to be stored before. A teacher's logits are read once. In mode=forward no logit
    needs to be stored. Only the hidden states and the weight are read, and those of the teacher.
    """
    columns = -(-problem.vocab // tp_size)
    models = 1 if problem.from_labels else 2
    if problem.trains:
        return (1 + models) * problem.tokens * columns * ITEM_BYTES[problem.dtype]
    return models * (problem.tokens + columns) * problem.hidden * ITEM_BYTES[problem.dtype]


BLOCK = {"cpu": 2**20, "cuda": 2**26}
"""Elements of a block of logits. About six float64 temporaries of it exist at once: 3 GiB on a GPU."""


@dataclass(frozen=True)
class Errors:
    """Errors of an output, over all ranks. A NaN or a missing result makes an error inf."""

    loss_value: float
    loss_error: float
    entropy_error: float
    hidden_grad_error: float
    weight_grad_error: float
    loss_identical: bool

    @property
    def grad_error(self) -> float:
        """The larger error of the two gradients."""
        return max(self.hidden_grad_error, self.weight_grad_error)

    def complaint(self, problem: LinearLoss) -> str | None:
        """Return why the output is wrong, or None if it is correct."""
        limits = {name: limit for name, limit in error_limits(problem).items() if name != "grad_error"}
        return complaint(self, limits, problem.dtype, {})


class Oracle(LossOracle):
    """Compares outputs of one problem. Collective over the shard's group."""

    shard: Shard

    def __init__(self, problem: LinearLoss, shard: Shard) -> None:
        self.divisor = problem.temperature if problem.loss == "logprob" else 1.0
        """Divisor of the logits."""
        super().__init__(problem, shard, shard.labels, 1.0 / self.divisor)
        self.hidden = self._whole(shard.hidden)
        self.teacher = None if shard.teacher is None else self._whole(shard.teacher[0])

    def compare(self, output: Output) -> Errors:
        """Return the errors of `output`, whose gradients must not be changed meanwhile."""
        shard, tokens = self.shard, self.problem.tokens
        row_loss, entropy, hidden_error = (
            torch.zeros(tokens, dtype=torch.float64, device=shard.device) for _ in range(3)
        )
        weight = shard.weight.double()
        teacher_weight = None if shard.teacher is None else shard.teacher[1].double()
        right_weight = torch.zeros_like(weight) if self.problem.trains else None
        got_hidden = self._whole_gradient(output.grad_hidden)
        for rows in self.blocks(BLOCK):
            hidden = self.hidden[rows].double()
            log_p = self._log_softmax(hidden @ weight.t() / self.divisor)
            log_q = None
            if self.teacher is not None and teacher_weight is not None:
                log_q = self._log_softmax(self.teacher[rows].double() @ teacher_weight.t() / self.problem.temperature)
            row_loss[rows] = self.row_losses(log_p, log_q, rows)
            entropy[rows] = self.sum(-weighted(log_p.exp(), log_p).sum(-1)) * self.counts[rows]
            if right_weight is not None:
                if shard.upstream is None:
                    grad = self.gradient_of_mean(log_p, log_q, row_loss[rows], rows)
                else:
                    grad = self._upstream_gradient(log_p, entropy[rows], rows)
                del log_p, log_q
                right_weight.addmm_(grad.t(), hidden)
                hidden_error[rows] = _row_errors(got_hidden, self.sum(grad @ weight), rows)
        right_loss = row_loss.sum() * self.inverse_count
        entropy_error = 0.0
        if self.problem.entropy:
            got = torch.full_like(entropy, math.nan) if output.entropy is None else output.entropy
            entropy_error = self.worst(relative_error(got, entropy).max())
        weight_error = 0.0
        if right_weight is not None:
            weight_error = self.worst(_weight_error(output.grad_weight, right_weight))
        return Errors(
            float(right_loss),
            self.loss_error(output.loss, output.row_loss, right_loss, row_loss),
            entropy_error,
            self.worst(hidden_error.max()) if self.problem.trains else 0.0,
            weight_error,
            self.identical([(output.loss, 1), (output.row_loss, tokens), (output.entropy, tokens)]),
        )

    def _log_softmax(self, logits: Tensor) -> Tensor:
        return logits - self.log_sum_exp(logits)[:, None]

    def _upstream_gradient(self, log_p: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        """Return the gradient of the policy's objective by the local logits of some rows (`Shard.upstream`).

        The gradient of log p[label] is (1 at the label) - p, that of the entropy H is -p (log p + H).
        """
        assert self.shard.upstream is not None
        of_logprob, of_entropy = (grad[rows].double()[:, None] for grad in self.shard.upstream)
        label, held = self.local_label(rows)
        p = log_p.exp()
        grad = -of_logprob * p
        grad.scatter_add_(1, label[:, None], held[:, None] * of_logprob)
        if self.problem.entropy:
            grad -= of_entropy * weighted(p, log_p + entropy[:, None])
        return grad.mul_(self.scale)

    def _whole(self, rows: Tensor) -> Tensor:
        """Return all rows of a matrix that ranks may hold parts of."""
        if self.shard.group is None or not self.problem.sequence_parallel:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.shard.tp_size)]
        dist.all_gather(parts, rows.contiguous(), group=self.shard.group)
        return torch.cat(parts)

    def _whole_gradient(self, grad: Tensor | None) -> Tensor | None:
        """Return all rows of the hidden states' gradient, or None if it is missing or has another shape on any rank."""
        wrong = grad is None or grad.shape != self.shard.hidden.shape
        if self.worst(torch.tensor(float(wrong), device=self.shard.device)) or grad is None:
            return None
        return self._whole(grad)


def _row_errors(got: Tensor | None, right: Tensor, rows: slice) -> Tensor:
    """Return ||got - right|| / ||right|| of each row. A row whose gradient is zero must be zero."""
    if got is None or got[rows].shape != right.shape:
        return torch.full((len(right),), math.inf, dtype=torch.float64, device=right.device)
    slack = torch.finfo(got.dtype).smallest_normal
    error = ((got[rows].double() - right).abs() - slack).clamp_(min=0.0).norm(dim=-1)
    norm = right.norm(dim=-1)
    relative = torch.where(norm > 0, error / norm, torch.where(error > 0, math.inf, 0.0))
    return relative.nan_to_num(nan=math.inf, posinf=math.inf)


def _weight_error(got: Tensor | None, right: Tensor) -> Tensor:
    """Return the largest ||row - right|| / ||right||, where ||right|| is at least the root mean square of all rows.

    Rows of columns that are no label and have small probabilities are smaller than the rounding errors of sums.
    """
    if got is None or got.shape != right.shape:
        return torch.tensor(math.inf, dtype=torch.float64, device=right.device)
    error = (right - got).abs_().sub_(torch.finfo(got.dtype).smallest_normal).clamp_(min=0.0).norm(dim=-1)
    norm = right.norm(dim=-1)
    usual = norm.square().mean().sqrt()
    relative = error / norm.clamp(min=usual) if usual > 0 else torch.where(error > 0, math.inf, error)
    return relative.max().nan_to_num(nan=math.inf, posinf=math.inf)
