"""Hidden states, weights and targets of a problem: hashes of their global indices, the same at any world size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpbench.workloads.hashing import hash_index, normal
from tpbench.workloads.linear_loss.problem import LinearLoss
from tpbench.workloads.vocabulary import IGNORED, shard_bounds

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tpbench.measure.session import Context

_HIDDEN, _WEIGHT, _TEACHER, _TEACHER_WEIGHT, _LABELS, _IGNORED, _UPSTREAM = range(100, 114, 2)
"""Random streams of a seed for row indices. The next stream is for column indices."""

_CHUNK = 2**22
"""Elements that are computed at once."""


@dataclass(frozen=True)
class Shard:
    """One rank's part of the problem."""

    hidden: Tensor
    """(tokens, hidden), or this rank's part of the rows with sequence_parallel."""
    weight: Tensor
    """(local vocab, hidden)."""
    labels: Tensor | None
    """(tokens,) int64, for cross_entropy and logprob."""
    teacher: tuple[Tensor, Tensor] | None
    """The teacher's hidden states and weight, for the other losses."""
    vocab_start: int
    """The first row of the whole weight that this rank holds."""
    vocab_size: int
    tokens: int
    group: ProcessGroup | None
    """The ranks that hold the vocabulary. None if one rank holds all of it."""
    tp_rank: int
    tp_size: int
    upstream: tuple[Tensor, Tensor] | None = None
    """For logprob with mode=train: the gradients of a policy's objective by each row's log-probability and entropy.

    (tokens,) fp32 each, 0 for a row that does not count. Without entropy=true, only the first is used.
    """

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def columns(self) -> int:
        """Columns of this rank's logits."""
        return len(self.weight)


def make_shard(problem: LinearLoss, context: Context) -> Shard:
    """Return this rank's inputs. The standard deviation of a logit is between 1.9 and 3.8."""
    start, stop = shard_bounds(problem.vocab, context.tp_size, context.tp_rank)
    first, last = 0, problem.tokens
    if problem.sequence_parallel:
        part = problem.tokens // context.tp_size
        first, last = context.tp_rank * part, (context.tp_rank + 1) * part
    labels, teacher, upstream = None, None, None
    if problem.from_labels:
        labels = _labels(problem, context.device)
        if problem.loss == "logprob" and problem.trains:
            upstream = _upstream(problem, labels)
    else:
        teacher = (
            _matrix(problem, _TEACHER, first, last, 1.0, context.device),
            _matrix(problem, _TEACHER_WEIGHT, start, stop, _scale(problem.hidden), context.device),
        )
    return Shard(
        _matrix(problem, _HIDDEN, first, last, 1.0, context.device),
        _matrix(problem, _WEIGHT, start, stop, _scale(problem.hidden), context.device),
        labels,
        teacher,
        start,
        problem.vocab,
        problem.tokens,
        context.tp_group if context.tp_size > 1 else None,
        context.tp_rank,
        context.tp_size,
        upstream,
    )


def _scale(hidden: int) -> float:
    """Return a power of two near 1 / (2 sqrt(hidden)), which rounds nothing."""
    return 2.0 ** -round(math.log2(2 * math.sqrt(hidden)))


def _labels(problem: LinearLoss, device: torch.device) -> Tensor:
    row = torch.arange(problem.tokens, dtype=torch.int64, device=device)
    label = (hash_index(problem.seed, _LABELS, row) * problem.vocab) >> 32
    threshold = round(problem.ignored * 2**32)
    return torch.where(hash_index(problem.seed, _IGNORED, row) < threshold, IGNORED, label)


def _upstream(problem: LinearLoss, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a random upstream gradient of the mean log-probability and one of the mean entropy, for each row."""
    counts = labels != IGNORED
    rows, columns = (
        hash_index(problem.seed, stream, torch.arange(size, device=labels.device))
        for stream, size in ((_UPSTREAM, problem.tokens), (_UPSTREAM + 1, 2))
    )
    of_logprob, of_entropy = normal(rows, columns).mul_((counts / counts.sum().clamp(min=1))[:, None]).unbind(1)
    return of_logprob.contiguous(), of_entropy.contiguous()


def _matrix(problem: LinearLoss, stream: int, first: int, last: int, scale: float, device: torch.device) -> Tensor:
    """Return rows [first, last) of a matrix with `hidden` columns: 2.31 * scale is its standard deviation."""
    out = torch.empty(last - first, problem.hidden, dtype=getattr(torch, problem.dtype), device=device)
    rows = hash_index(problem.seed, stream, torch.arange(first, last, device=device))
    columns = hash_index(problem.seed, stream + 1, torch.arange(problem.hidden, device=device))
    step = max(1, _CHUNK // problem.hidden)
    for top in range(0, last - first, step):
        out[top : top + step] = normal(rows[top : top + step], columns).mul_(scale)
    return out
