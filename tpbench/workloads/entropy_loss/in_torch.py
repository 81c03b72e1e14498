"""The entropy loss in torch operations: by the kernels' algorithm in fp32 with a closed form of the gradient
(pytorch_tp_manual), and of the gathered vocabulary by torch's own losses and autograd (pytorch_gather)."""

from collections.abc import Sequence
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
    """Prepare statistics of the local shard, one packed all-gather, or all-reduces of maxima and of sums, the rest."""
    algorithm = _Algorithm(problem, shard)
    statistics, finish = (_compiled(problem, part) for part in (algorithm.statistics, algorithm.finish))
    sent = (shard.tp_size - 1) * shard.tokens * algorithm.width * 4
    if problem.exchange == "all_reduce":
        sent = formulas.bytes_of_statistics(algorithm.width, shard)

    def run() -> Output:
        local = statistics(shard.logits, shard.target)
        exchanged = local[None]
        if shard.group is not None and problem.exchange == "all_reduce":
            exchanged = _all_reduced(local, algorithm, shard)[None]
        elif shard.group is not None:
            exchanged = gather_rows(local, shard.group).view(shard.tp_size, *local.shape)
        return Output(*finish(shard.logits, shard.target, exchanged))

    return Step(run, bytes_communicated=sent)


def _compiled(problem: EntropyLoss, function: Any) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=False) if problem.compile else function


def _all_reduced(local: Tensor, algorithm: "_Algorithm", shard: Shard) -> Tensor:
    """Return the statistics of the whole vocabulary, (width, tokens), by all-reduces of maxima, then of sums."""
    maxima = shard.reduce(local[: algorithm.maxima].clone(), dist.ReduceOp.MAX)
    return torch.cat((maxima, shard.reduce(torch.stack(algorithm.relative_sums(local, maxima)))))


def _minus_one_hot(p: Tensor, column: Tensor, held: Tensor) -> Tensor:
    """Return p - onehot(column) in the rows that hold the column."""
    if torch.compiler.is_compiling():  # a comparison can be fused
        one_hot = held[:, None] & (torch.arange(p.shape[1], device=p.device) == column[:, None])
        return p - one_hot.float()
    return p.scatter_add_(1, column[:, None], -held.float()[:, None])


def _max_and_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's maximum and sum of exp(x - maximum)."""
    maximum = x.amax(-1)
    return maximum, (x - maximum[:, None]).exp_().sum(-1)


class _Algorithm:
    """The numbers of each row that ranks exchange, maxima and then sums, and the loss and gradient that follow.

    Of a loss from labels they are (m, s, x[label]). A loss against target logits is a mean of log p - log q, weighted
    by p or q: (m, m_t, s, s_t, weighted sum of the difference of logits). Its gradient by x is p * (difference - mean)
    if p is the weight, and p - q if q is.
    """

    def __init__(self, problem: EntropyLoss, shard: Shard) -> None:
        self.problem, self.rows, self.start, self.loss = problem, shard.rows, shard.vocab_start, problem.loss
        self.from_labels, self.weight_is_p = problem.from_labels, problem.loss == "reverse_kl"
        self.maxima = 1 if self.from_labels else 2
        self.sums: Sequence[int | None] = (0, None) if self.from_labels else (0, 1, 0 if self.weight_is_p else 1)
        """For each sum the maximum that its exponents are relative to, or None if it has no exponents."""
        self.width = self.maxima + len(self.sums)

    def relative_sums(self, statistics: Sequence[Tensor] | Tensor, maxima: Tensor) -> list[Tensor]:
        """Return the sums relative to other maxima than those of the statistics."""
        sums = zip(self.sums, statistics[self.maxima :], strict=True)
        return [row if at is None else row * (statistics[at] - maxima[at]).exp() for at, row in sums]

    def statistics(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the numbers of this rank's columns, (width, tokens)."""
        x, t = self._scaled(logits, target)
        m, s = _max_and_sum(x)
        if self.from_labels:
            local, held = self._local(logits, target)
            return torch.stack((m, s, torch.where(held, x.gather(1, local[:, None])[:, 0], 0.0)))
        m_t, s_t = _max_and_sum(t)
        weight = (x - m[:, None]).exp() if self.weight_is_p else (t - m_t[:, None]).exp()
        return torch.stack((m, m_t, s, s_t, (weight * self._difference(x, t)).sum(-1)))

    def finish(self, logits: Tensor, target: Tensor, exchanged: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the losses of rows and the gradient. exchanged: of all ranks, (tp_size, width, tokens)."""
        maxima = exchanged[:, : self.maxima].amax(0)
        sums = [row.sum(0) for row in self.relative_sums(exchanged.unbind(1), maxima)]
        if self.from_labels:
            return self._of_labels(logits, target, maxima[0], *sums)
        (m, m_t), (s, s_t, weighted) = maxima, sums
        log_z, log_z_t, factor = m + s.log(), m_t + s_t.log(), self.problem.scale / logits.shape[0]
        x, t = self._scaled(logits, target)
        p = (x - m[:, None]).exp_().div_(s[:, None])
        mean = weighted / (s if self.weight_is_p else s_t)
        if self.weight_is_p:
            grad = self._difference(x, t).sub_(mean[:, None]).mul_(p).mul_(factor)
            row_loss = mean + log_z_t - log_z
        else:
            grad = p.sub_((t - m_t[:, None]).exp_().div_(s_t[:, None])).mul_(factor)
            row_loss = log_z - mean if self.loss == "soft_cross_entropy" else mean + log_z - log_z_t
        return row_loss.mean(), row_loss, grad.to(logits.dtype)

    def _of_labels(
        self, logits: Tensor, label: Tensor, m: Tensor, s: Tensor, x_label: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        counts, row_loss = label != IGNORED, s.log() + (m - x_label)
        slope: Any = 1.0
        if self.loss == "policy":
            row_loss, slope = formulas.policy_losses(self.problem, -row_loss, self.rows)
        row_loss, inverse = torch.where(counts, row_loss, 0.0), 1.0 / counts.sum().clamp(min=1)
        factor = torch.where(counts, slope * inverse * self.problem.scale, 0.0)
        p = (formulas.product(logits.float(), self.problem.scale) - m[:, None]).exp_().div_(s[:, None])
        grad = _minus_one_hot(p, *self._local(logits, label)).mul_(factor[:, None])
        return row_loss.sum() * inverse, row_loss, grad.to(logits.dtype)

    def _local(self, logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels' local columns, and a mask of those that this rank holds."""
        local = label - self.start
        return local.clamp(0, logits.shape[1] - 1), (local >= 0) & (local < logits.shape[1])

    def _difference(self, x: Tensor, t: Tensor) -> Tensor:
        if self.loss == "soft_cross_entropy":
            return x
        return x - t if self.weight_is_p else t - x

    def _scaled(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        t = target if self.from_labels else formulas.product(target.float(), self.problem.target_scale)
        return formulas.product(logits.float(), self.problem.scale), t


def prepare_gather(problem: EntropyLoss, shard: Shard) -> Step:
    """Prepare a gather, the loss, compiled or not, its backward, and this rank's slice of the gradient."""
    compiled = _compiled(problem, lambda *arguments: formulas.of_whole_vocabulary(problem, *arguments))

    def run() -> Output:
        logits = formulas.gathered(shard, shard.logits)
        target = formulas.gathered_target(problem, shard, shard.target)
        (loss, row_loss, entropy), (grad,) = formulas.differentiated(
            (logits,), lambda x: compiled(x, target, shard.rows)
        )
        grad = grad[:, shard.vocab_start : shard.vocab_stop].contiguous()
        return Output(loss, row_loss.float(), grad, entropy=entropy)

    return Step(run, formulas.bytes_of_gather(problem, shard, shard.logits.itemsize))
