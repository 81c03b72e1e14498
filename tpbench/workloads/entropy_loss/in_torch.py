"""pytorch_tp_manual and pytorch_gather: the entropy loss in torch operations.

pytorch_tp_manual is the kernels' algorithm with a closed form of the gradient: statistics of the local shard, one
packed all-gather (exchange=all_reduce: all-reduces of the maxima, then of the sums), then loss and gradient; fp32
throughout. pytorch_gather has the whole vocabulary on every rank, and uses torch's own losses and autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.collectives import gather_rows
from tpbench.workloads.entropy_loss.inputs import Output, Shard, Step
from tpbench.workloads.entropy_loss.problem import EntropyLoss
from tpbench.workloads.losses import formulas
from tpbench.workloads.sizes import IGNORED


def prepare_manual(problem: EntropyLoss, shard: Shard) -> Step:
    """Prepare an iteration of pytorch_tp_manual.

    With compile=true the parts before and after the collective go through torch.compile, each as one graph.
    """
    algorithm = _Labels(problem, shard) if problem.from_labels else _TwoLogits(problem, shard)
    statistics: Any = algorithm.statistics
    finish: Any = algorithm.finish
    if problem.compile:
        statistics = torch.compile(statistics, fullgraph=True, dynamic=False)
        finish = torch.compile(finish, fullgraph=True, dynamic=False)

    sent = (shard.tp_size - 1) * shard.tokens * algorithm.width * 4
    if problem.exchange == "all_reduce":
        sent = formulas.bytes_of_statistics(algorithm.width, shard)

    def run() -> Output:
        local = statistics(shard.logits, shard.target)
        exchanged = local[None]
        if shard.group is not None and problem.exchange == "all_reduce":
            exchanged = _all_reduced(local, algorithm, shard.group)[None]
        elif shard.group is not None:
            exchanged = gather_rows(local, shard.group).view(shard.tp_size, *local.shape)
        return Output(*finish(shard.logits, shard.target, exchanged))

    return Step(run, bytes_communicated=sent)


def _all_reduced(local: Tensor, algorithm: _Algorithm, group: dist.ProcessGroup) -> Tensor:
    """Return the statistics of the whole vocabulary, (width, tokens), by all-reduces of maxima, then of sums."""
    maxima = local[: algorithm.maxima].clone()
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    sums = torch.stack(algorithm.relative_sums(local, maxima))
    dist.all_reduce(sums, group=group)
    return torch.cat((maxima, sums))


def _minus_one_hot(p: Tensor, column: Tensor, held: Tensor) -> Tensor:
    """Return p - onehot(column) in the rows that hold the column.

    Compiled code uses a comparison, which can be fused. Eager code uses a scatter.
    """
    if torch.compiler.is_compiling():
        one_hot = held[:, None] & (torch.arange(p.shape[1], device=p.device) == column[:, None])
        return p - one_hot.float()
    return p.scatter_add_(1, column[:, None], -held.float()[:, None])


def _max_and_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's maximum and sum of exp(x - maximum)."""
    maximum = x.amax(-1)
    return maximum, (x - maximum[:, None]).exp_().sum(-1)


class _Algorithm:
    """The numbers of each row that ranks exchange: maxima, then sums."""

    maxima: int
    sums: Sequence[int | None]
    """For each sum the maximum that its exponents are relative to, or None if it has no exponents."""

    @property
    def width(self) -> int:
        return self.maxima + len(self.sums)

    def relative_sums(self, statistics: Sequence[Tensor] | Tensor, maxima: Tensor) -> list[Tensor]:
        """Return the sums relative to other maxima than those of the statistics."""
        sums = zip(self.sums, statistics[self.maxima :], strict=True)
        return [row if at is None else row * (statistics[at] - maxima[at]).exp() for at, row in sums]

    def merged(self, exchanged: Tensor) -> list[Tensor]:
        """Return the statistics of the whole vocabulary from those of the ranks, (tp_size, width, tokens)."""
        maxima = exchanged[:, : self.maxima].amax(0)
        return [*maxima, *(row.sum(0) for row in self.relative_sums(exchanged.unbind(1), maxima))]


class _Labels(_Algorithm):
    """Cross-entropy from labels. The statistics of a row are (m, s, x[label])."""

    maxima, sums = 1, (0, None)

    def __init__(self, problem: EntropyLoss, shard: Shard) -> None:
        self.problem, self.rows = problem, shard.rows
        self.scale, self.start = problem.scale, shard.vocab_start

    def _local(self, logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels' local columns, and a mask of those that this rank holds."""
        local = label - self.start
        held = (local >= 0) & (local < logits.shape[1])
        return local.clamp(0, logits.shape[1] - 1), held

    def statistics(self, logits: Tensor, label: Tensor) -> Tensor:
        x = formulas.product(logits.float(), self.scale)
        local, held = self._local(logits, label)
        x_label = torch.where(held, x.gather(1, local[:, None])[:, 0], 0.0)
        return torch.stack((*_max_and_sum(x), x_label))

    def finish(self, logits: Tensor, label: Tensor, exchanged: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, s, x_label = self.merged(exchanged)
        counts = label != IGNORED
        row_loss = s.log() + (m - x_label)
        slope: Any = 1.0
        if self.problem.loss == "policy":
            row_loss, slope = formulas.policy_losses(self.problem, -row_loss, self.rows)
        row_loss = torch.where(counts, row_loss, 0.0)
        inverse = 1.0 / counts.sum().clamp(min=1)
        factor = torch.where(counts, slope * inverse * self.scale, 0.0)
        local, held = self._local(logits, label)
        p = (formulas.product(logits.float(), self.scale) - m[:, None]).exp_().div_(s[:, None])
        grad = _minus_one_hot(p, local, held).mul_(factor[:, None])
        return row_loss.sum() * inverse, row_loss, grad.to(logits.dtype)


class _TwoLogits(_Algorithm):
    """Losses against target logits: the mean over the vocabulary of a difference of log p and log q.

    Its weights are p or q. The statistics of a row are (m, m_t, s, s_t, weighted sum of the difference of logits). The
    gradient by x is p * (difference - mean) if p is the weight, and p - q if q is.
    """

    maxima = 2

    def __init__(self, problem: EntropyLoss, shard: Shard) -> None:
        self.loss, self.weight_is_p = problem.loss, problem.loss == "reverse_kl"
        self.scale, self.target_scale = problem.scale, problem.target_scale
        self.sums = (0, 1, 0 if self.weight_is_p else 1)

    def _difference(self, x: Tensor, t: Tensor) -> Tensor:
        if self.loss == "soft_cross_entropy":
            return x
        return x - t if self.weight_is_p else t - x

    def _scaled(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return formulas.product(logits.float(), self.scale), formulas.product(target.float(), self.target_scale)

    def statistics(self, logits: Tensor, target: Tensor) -> Tensor:
        x, t = self._scaled(logits, target)
        m, s = _max_and_sum(x)
        m_t, s_t = _max_and_sum(t)
        weight = (x - m[:, None]).exp() if self.weight_is_p else (t - m_t[:, None]).exp()
        return torch.stack((m, m_t, s, s_t, (weight * self._difference(x, t)).sum(-1)))

    def finish(self, logits: Tensor, target: Tensor, exchanged: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, m_t, s, s_t, weighted = self.merged(exchanged)
        log_z, log_z_t = m + s.log(), m_t + s_t.log()
        x, t = self._scaled(logits, target)
        p = (x - m[:, None]).exp_().div_(s[:, None])
        factor = self.scale / logits.shape[0]
        if self.weight_is_p:
            mean = weighted / s
            grad = self._difference(x, t).sub_(mean[:, None]).mul_(p).mul_(factor)
        else:
            mean = weighted / s_t
            grad = p.sub_((t - m_t[:, None]).exp_().div_(s_t[:, None])).mul_(factor)
        if self.loss == "soft_cross_entropy":
            row_loss = log_z - mean
        else:
            row_loss = mean + (log_z_t - log_z if self.weight_is_p else log_z - log_z_t)
        return row_loss.mean(), row_loss, grad.to(logits.dtype)


def prepare_gather(problem: EntropyLoss, shard: Shard) -> Step:
    """Prepare an iteration of pytorch_gather: gather, loss, backward, and this rank's slice of the gradient.

    With compile=true the loss goes through torch.compile as one graph, and autograd's backward with it.
    """

    def losses(logits: Tensor, target: Any, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return formulas.mean_and_rows(problem, formulas.scaled(problem, logits), target, rows)

    compiled: Any = torch.compile(losses, fullgraph=True, dynamic=False) if problem.compile else losses

    def run() -> Output:
        logits = formulas.gathered(shard, shard.logits)
        target = formulas.gathered_target(problem, shard, shard.target)
        (loss, row_loss, _), (grad,) = formulas.differentiated((logits,), lambda x: compiled(x, target, shard.rows))
        return Output(loss, row_loss.float(), grad[:, shard.vocab_start : shard.vocab_stop].contiguous())

    return Step(run, formulas.bytes_of_gather(problem, shard, shard.logits.itemsize))
