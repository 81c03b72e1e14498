"""Hidden states, weights and targets of a problem: hashes of their global indices, the same at any world size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpbench.workloads.hashing import hash_index, normal
from tpbench.workloads.linear_loss.interface import Shard
from tpbench.workloads.linear_loss.problem import LinearLoss
from tpbench.workloads.losses.inputs import labels, normal_matrix
from tpbench.workloads.vocabulary import IGNORED, shard_bounds

if TYPE_CHECKING:
    from tpbench.measure.session import Context

_HIDDEN, _WEIGHT, _TEACHER, _TEACHER_WEIGHT, _LABELS, _IGNORED, _UPSTREAM = range(100, 114, 2)
"""Random streams of a seed for row indices. The next stream is for column indices."""


def make_shard(problem: LinearLoss, context: Context) -> Shard:
    """Return this rank's inputs. The standard deviation of a logit is between 1.9 and 3.8."""
    device, part = context.device, problem.tokens // context.tp_size
    columns = range(*shard_bounds(problem.vocab, context.tp_size, context.tp_rank))
    rows = range(problem.tokens)
    if problem.sequence_parallel:
        rows = range(context.tp_rank * part, (context.tp_rank + 1) * part)

    def matrix(stream: int, indices: range, scale: float = 1.0) -> Tensor:
        width = range(problem.hidden)
        return normal_matrix(problem.seed, (stream, stream + 1), indices, width, problem.dtype, device, scale)

    weight_scale = _scale(problem.hidden)
    label, teacher, upstream = None, None, None
    if problem.from_labels:
        streams = (_LABELS, _IGNORED)
        label = labels(problem.seed, streams, range(problem.tokens), problem.vocab, problem.ignored, device)
        if problem.loss == "logprob" and problem.trains:
            upstream = _upstream(problem, label)
    else:
        teacher = matrix(_TEACHER, rows), matrix(_TEACHER_WEIGHT, columns, weight_scale)
    return Shard(
        matrix(_HIDDEN, rows),
        matrix(_WEIGHT, columns, weight_scale),
        label,
        teacher,
        columns.start,
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


def _upstream(problem: LinearLoss, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a random upstream gradient of the mean log-probability and one of the mean entropy, for each row."""
    counts = labels != IGNORED
    rows, columns = (
        hash_index(problem.seed, stream, torch.arange(size, device=labels.device))
        for stream, size in ((_UPSTREAM, problem.tokens), (_UPSTREAM + 1, 2))
    )
    of_logprob, of_entropy = normal(rows, columns).mul_((counts / counts.sum().clamp(min=1))[:, None]).unbind(1)
    return of_logprob.contiguous(), of_entropy.contiguous()
