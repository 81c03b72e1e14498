"""The float64 oracle of losses over a sharded vocabulary, in blocks of rows, and errors against it.

It computes the definitions (log-softmax, then the sum) in float64, on the same shards as the variants, with plain
all-reduces of one number per row. Blocks of rows bound its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.workloads.losses.formulas import TWO_LOGIT_LOSSES


class VocabularyShard(Protocol):
    """The columns of one rank."""

    @property
    def vocab_start(self) -> int:
        """The first column that this rank holds."""

    @property
    def columns(self) -> int:
        """Number of columns that this rank holds."""

    @property
    def tp_size(self) -> int:
        """Number of ranks."""

    @property
    def group(self) -> Any:
        """The ranks' process group, or None if one rank holds all columns."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""


class LossOracle:
    """Losses and gradients of blocks of rows, from exact logits. Its methods are collective over the shard's group."""

    def __init__(self, problem: Any, shard: VocabularyShard, labels: Tensor | None, scale: float) -> None:
        """`labels`: (tokens,), or None for a loss against target logits. `scale`: factor on the logits."""
        self.problem, self.shard, self.labels, self.scale = problem, shard, labels, scale
        self.counts = torch.ones(problem.tokens, dtype=torch.bool, device=shard.device)
        if labels is not None:
            self.counts = (labels >= 0) & (labels < problem.vocab)
        self.inverse_count = 1.0 / max(1, int(self.counts.sum()))

    def blocks(self, elements: Mapping[str, int]) -> Iterator[slice]:
        """Yield slices of rows with about so many logits on a rank, by type of device. They are equal on all ranks."""
        columns = -(-self.problem.vocab // self.shard.tp_size)
        step = max(1, elements[self.shard.device.type] // columns)
        return (slice(first, min(first + step, self.problem.tokens)) for first in range(0, self.problem.tokens, step))

    def log_sum_exp(self, x: Tensor) -> Tensor:
        """Return log(sum(exp(x))) over the whole vocabulary, (rows,), from the local columns of some rows."""
        # The maximum of a NaN is undefined in a reduction. An infinity in its place becomes a NaN again below.
        highest = x.amax(-1).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        highest = self.reduce(highest, dist.ReduceOp.MAX)
        return highest + self.sum((x - highest[:, None]).exp().sum(-1)).log()

    def row_losses(self, log_p: Tensor, log_q: Tensor | None, rows: slice) -> Tensor:
        """Return each row's loss, or log-probability for loss=logprob, 0 for a row that does not count.

        log_q: log-probabilities of the target logits, or None for losses from labels.
        """
        if log_q is not None:
            loss = TWO_LOGIT_LOSSES[self.problem.loss]
            weight = (log_p if loss.weight == "p" else log_q).exp()
            return self.sum(weighted(weight, loss.value(log_p, log_q)).sum(-1))
        label, held = self.local_label(rows)
        logprob = self.sum(torch.where(held, log_p.gather(1, label[:, None])[:, 0], 0.0))
        return logprob if self.problem.loss == "logprob" else -logprob

    def gradient_of_mean(self, log_p: Tensor, log_q: Tensor | None, row_loss: Tensor, rows: slice) -> Tensor:
        """Return the gradient of the mean loss by the unscaled local logits of some rows."""
        grad = log_p.exp()
        if log_q is None:
            label, held = self.local_label(rows)
            grad.scatter_add_(1, label[:, None], -held.double()[:, None])
        elif TWO_LOGIT_LOSSES[self.problem.loss].weight == "p":
            grad = weighted(grad, TWO_LOGIT_LOSSES[self.problem.loss].value(log_p, log_q) - row_loss[:, None])
        else:
            grad -= log_q.exp()
        return grad.mul_(self.scale * self.inverse_count).masked_fill_(~self.counts[rows, None], 0.0)

    def local_label(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the labels' local columns, and a mask of the rows whose label this rank holds."""
        assert self.labels is not None
        label = self.labels[rows] - self.shard.vocab_start
        held = self.counts[rows] & (label >= 0) & (label < self.shard.columns)
        return label.where(held, torch.zeros_like(label)), held

    def loss_error(self, loss: Tensor, row_loss: Tensor | None, right: Tensor, right_rows: Tensor) -> float:
        """Return the largest `relative_error` of the mean loss and, if a variant has them, of the rows' losses."""
        errors = [relative_error(loss, right)]
        if row_loss is not None:
            errors.append(relative_error(row_loss, right_rows))
        return self.worst(torch.stack([error.max() for error in errors if error.numel()]).max())

    def identical(self, outputs: Iterable[tuple[Tensor | None, int]]) -> bool:
        """Return whether all ranks have the same bits in each output, of which each has so many numbers."""
        all_bits = torch.cat([bits(values, count, self.shard.device) for values, count in outputs])
        lowest, highest = (self.reduce(all_bits.clone(), op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
        return torch.equal(lowest, highest)

    def worst(self, error: Tensor) -> float:
        """Return the largest error of all ranks."""
        return float(self.reduce(error.double().reshape(1), dist.ReduceOp.MAX))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return self.reduce(values, dist.ReduceOp.SUM)

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Return the values of all ranks, combined."""
        if self.shard.group is not None:
            values = values.contiguous()
            dist.all_reduce(values, op, group=self.shard.group)
        return values


def complaint(errors: Any, limits: Mapping[str, float], dtype: str, instead: Mapping[str, str]) -> str | None:
    """Return why an output is wrong, or None if it is correct.

    errors: an object with an attribute for each limit. A NaN is above every limit. instead: texts that replace that of
    an error above its limit, unless they are empty.
    """
    wrong = [
        instead.get(name) or f"{name} {getattr(errors, name):.3g} is above {limit:.3g}"
        for name, limit in limits.items()
        if not getattr(errors, name) <= limit
    ]
    return f"{' and '.join(wrong)} ({dtype})" if wrong else None


def weighted(weight: Tensor, value: Tensor) -> Tensor:
    """Return weight * value, and 0 where the weight is 0, since 0 log 0 = 0."""
    return torch.where(weight == 0, 0.0, weight * value)


def relative_error(got: Tensor, right: Tensor) -> Tensor:
    """Return |got - right| / max(1, |right|) in float64: 0 for equal values, even infinite; inf for a NaN.

    A tensor of another shape has the error (1,) inf.
    """
    if got.shape != right.shape:
        return torch.full((1,), math.inf, dtype=torch.float64, device=right.device)
    got, right = got.double(), right.double()
    error = (got - right).abs() / right.abs().clamp(min=1.0)
    return torch.where(got == right, 0.0, error.nan_to_num(nan=math.inf, posinf=math.inf))


def bits(values: Tensor | None, count: int, device: torch.device) -> Tensor:
    """Return (1 + count,) int32: the number of values, and the bits of each in fp32.

    Without values, or with another number of them, the bits are 0. The shape depends on `count` alone, so all ranks can
    reduce the result even if their variants returned different shapes.
    """
    numel = -1 if values is None else values.numel()
    result = torch.zeros(1 + count, dtype=torch.int32, device=device)
    result[0] = numel
    if values is not None and numel == count:
        result[1:] = values.reshape(-1).float().view(torch.int32)
    return result
