"""The float64 oracle: losses, entropies and both gradients in blocks of rows, and the errors of a variant's output.

Logits are exact here, while variants round them to their dtype. So tolerances are those of rounded logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.workloads.linear_loss.inputs import Shard
from tpbench.workloads.linear_loss.limits import ENTROPY_TOLERANCE, GRADIENT_TOLERANCE, LOSS_TOLERANCE
from tpbench.workloads.linear_loss.output import Output
from tpbench.workloads.linear_loss.problem import LinearLoss
from tpbench.workloads.oracle_arithmetic import bits, relative_error, weighted
from tpbench.workloads.two_logit_losses import TWO_LOGIT_LOSSES

_CHUNK = {"cpu": 2**20, "cuda": 2**26}
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

    def complaint(self, dtype: str, gradient_factor: int = 1) -> str | None:
        """Return why the output is wrong, or None if it is correct.

        gradient_factor: factor on the gradients' tolerance, from the function of that name.
        """
        gradient = GRADIENT_TOLERANCE[dtype] * gradient_factor
        limits = {
            "loss_error": LOSS_TOLERANCE[dtype],
            "entropy_error": ENTROPY_TOLERANCE[dtype],
            "hidden_grad_error": gradient,
            "weight_grad_error": gradient,
        }
        wrong = [
            f"{name} {getattr(self, name):.3g} is above {limit:.3g}"
            for name, limit in limits.items()
            if not getattr(self, name) <= limit
        ]
        return f"{' and '.join(wrong)} ({dtype})" if wrong else None


class Oracle:
    """Compares outputs of one problem. Collective over the shard's group."""

    def __init__(self, problem: LinearLoss, shard: Shard) -> None:
        self.problem, self.shard = problem, shard
        self.hidden = self._whole(shard.hidden)
        self.teacher = None if shard.teacher is None else self._whole(shard.teacher[0])
        self.counts = torch.ones(problem.tokens, dtype=torch.bool, device=shard.device)
        if shard.labels is not None:
            self.counts = (shard.labels >= 0) & (shard.labels < problem.vocab)
        self.inverse_count = 1.0 / max(1, int(self.counts.sum()))
        self.divisor = problem.temperature if problem.loss == "logprob" else 1.0
        """Divisor of the logits."""

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
        for rows in self._blocks():
            hidden = self.hidden[rows].double()
            log_p = self._log_softmax(hidden @ weight.t() / self.divisor)
            log_q = None
            if self.teacher is not None and teacher_weight is not None:
                log_q = self._log_softmax(self.teacher[rows].double() @ teacher_weight.t() / self.problem.temperature)
            row_loss[rows] = self._loss(log_p, log_q, rows)
            entropy[rows] = self._sum(-weighted(log_p.exp(), log_p).sum(-1)) * self.counts[rows]
            if right_weight is not None:
                if self.shard.upstream is None:
                    grad = self._gradient(log_p, log_q, row_loss[rows], rows)
                else:
                    grad = self._upstream_gradient(log_p, entropy[rows], rows)
                del log_p, log_q
                right_weight.addmm_(grad.t(), hidden)
                right_hidden = self._sum(grad @ weight)
                hidden_error[rows] = _row_errors(got_hidden, right_hidden, rows)
        right_loss = row_loss.sum() * self.inverse_count
        loss_errors = [relative_error(output.loss, right_loss)]
        if output.row_loss is not None:
            loss_errors.append(relative_error(output.row_loss, row_loss))
        entropy_error = 0.0
        if self.problem.entropy:
            got = torch.full_like(entropy, math.nan) if output.entropy is None else output.entropy
            entropy_error = self._worst(relative_error(got, entropy).max())
        weight_error = 0.0
        if right_weight is not None:
            weight_error = self._worst(_weight_error(output.grad_weight, right_weight))
        return Errors(
            float(right_loss),
            self._worst(torch.stack([each.max() for each in loss_errors]).max()),
            entropy_error,
            self._worst(hidden_error.max()) if self.problem.trains else 0.0,
            weight_error,
            self._identical(output),
        )

    def _blocks(self) -> Iterator[slice]:
        # The same on every rank, since blocks contain collectives.
        columns = -(-self.problem.vocab // self.shard.tp_size)
        step = max(1, _CHUNK[self.shard.device.type] // columns)
        return (slice(first, min(first + step, self.problem.tokens)) for first in range(0, self.problem.tokens, step))

    def _log_softmax(self, logits: Tensor) -> Tensor:
        highest = self._reduce(logits.amax(-1), dist.ReduceOp.MAX)
        total = self._sum((logits - highest[:, None]).exp().sum(-1))
        return logits - (highest + total.log())[:, None]

    def _loss(self, log_p: Tensor, log_q: Tensor | None, rows: slice) -> Tensor:
        if log_q is not None:
            loss = TWO_LOGIT_LOSSES[self.problem.loss]
            weight = (log_p if loss.weight == "p" else log_q).exp()
            return self._sum(weighted(weight, loss.value(log_p, log_q)).sum(-1))
        label, held = self._label(rows)
        of_label = log_p.gather(1, label[:, None])[:, 0]
        logprob = self._sum(torch.where(held, of_label, 0.0))
        return logprob if self.problem.loss == "logprob" else -logprob

    def _gradient(self, log_p: Tensor, log_q: Tensor | None, row_loss: Tensor, rows: slice) -> Tensor:
        """Return the gradient of the mean loss by the local logits of some rows."""
        p = log_p.exp()
        if log_q is None:
            label, held = self._label(rows)
            p.scatter_add_(1, label[:, None], -held.double()[:, None])
        elif TWO_LOGIT_LOSSES[self.problem.loss].weight == "p":
            p = weighted(p, TWO_LOGIT_LOSSES[self.problem.loss].value(log_p, log_q) - row_loss[:, None])
        else:
            p -= log_q.exp()
        return p.mul_((self.counts[rows] * self.inverse_count)[:, None])

    def _upstream_gradient(self, log_p: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        """Return the gradient of the policy's objective by the local logits of some rows (`Shard.upstream`).

        The gradient of log p[label] is (1 at the label) - p, that of the entropy H is -p (log p + H).
        """
        assert self.shard.upstream is not None
        of_logprob, of_entropy = (each[rows].double()[:, None] for each in self.shard.upstream)
        label, held = self._label(rows)
        p = log_p.exp()
        grad = -of_logprob * p
        grad.scatter_add_(1, label[:, None], held[:, None] * of_logprob)
        if self.problem.entropy:
            grad -= of_entropy * weighted(p, log_p + entropy[:, None])
        return grad.div_(self.divisor)

    def _label(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the labels' local columns, and a mask of the rows whose label this rank holds."""
        assert self.shard.labels is not None
        label = self.shard.labels[rows] - self.shard.vocab_start
        held = self.counts[rows] & (label >= 0) & (label < self.shard.columns)
        return label.where(held, torch.zeros_like(label)), held

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
        if self._worst(torch.tensor(float(wrong), device=self.shard.device)) or grad is None:
            return None
        return self._whole(grad)

    def _identical(self, output: Output) -> bool:
        expected = ((output.loss, 1), (output.row_loss, self.problem.tokens), (output.entropy, self.problem.tokens))
        all_bits = torch.cat([bits(each, count, self.shard.device) for each, count in expected])
        lowest, highest = (self._reduce(all_bits.clone(), op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
        return torch.equal(lowest, highest)

    def _worst(self, error: Tensor) -> float:
        return float(self._reduce(error.double().reshape(1), dist.ReduceOp.MAX))

    def _sum(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.shard.group is not None:
            values = values.contiguous()
            dist.all_reduce(values, op, group=self.shard.group)
        return values


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
