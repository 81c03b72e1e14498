"""The problem's inputs, the same numbers at any world size and on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tpbench.workloads.entropy_loss.interface import Shard
from tpbench.workloads.losses.inputs import labels, normal_matrix
from tpbench.workloads.vocabulary import shard_bounds

if TYPE_CHECKING:
    from tpbench.measure.session import Context
    from tpbench.workloads.entropy_loss.problem import EntropyLoss

_LOGITS, _TARGET_LOGITS, _LABELS, _IGNORED = range(1, 5)
"""Streams of independent numbers from one seed."""
_COLUMNS = 16
"""Distance of the stream of column indices from that of row indices."""


def make_shard(problem: EntropyLoss, context: Context) -> Shard:
    """Return this rank's inputs. Data-parallel replicas take consecutive rows of one larger problem."""
    start, stop = shard_bounds(problem.vocab, context.tp_size, context.tp_rank)
    first = context.dp_rank * problem.tokens
    rows, columns, seed = range(first, first + problem.tokens), range(start, stop), problem.seed

    def matrix(stream: int) -> Tensor:
        return normal_matrix(seed, (stream, stream + _COLUMNS), rows, columns, problem.dtype, context.device)

    if problem.from_labels:
        target = labels(seed, (_LABELS, _IGNORED), rows, problem.vocab, problem.ignored, context.device)
    else:
        target = matrix(_TARGET_LOGITS)
    group = context.tp_group if context.tp_size > 1 else None
    return Shard(matrix(_LOGITS), target, start, problem.vocab, group, context.tp_rank, context.tp_size)
