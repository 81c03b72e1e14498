"""What a variant of the linear loss gets and returns, and the random inputs: the same at any world size."""

import math
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from tpbench.measure.session import Context
from tpbench.workloads import step
from tpbench.workloads.hashing import hash_index, normal
from tpbench.workloads.linear_loss.problem import LinearLoss
from tpbench.workloads.losses.inputs import LossShard, given_target, normal_matrix, place
from tpbench.workloads.sizes import IGNORED, shard_bounds


@dataclass(frozen=True, kw_only=True)
class Shard(LossShard):
    """One rank's part of the problem. It holds the columns of the logits whose rows of the weight it holds."""

    hidden: Tensor
    """(tokens, hidden), or this rank's part of the rows with sequence_parallel."""
    weight: Tensor
    """(local vocab, hidden)."""
    upstream: tuple[Tensor, Tensor] | None = None
    """For logprob with mode=train: the gradients of an objective by each row's log-probability and entropy, (tokens,)
    fp32, 0 for a row that does not count. Without entropy=true, only the first is used."""

    @property
    def labels(self) -> Tensor | None:
        return self.target if isinstance(self.target, Tensor) else None

    @property
    def teacher(self) -> tuple[Tensor, Tensor] | None:
        """The teacher's hidden states and weight, for losses without labels or a top k."""
        return self.target if type(self.target) is tuple else None


@dataclass(frozen=True)
class Output:
    """One iteration's result on one rank."""

    loss: Tensor
    """fp32 scalar: the mean loss (or log-probability) over the rows that count, 0 if none counts."""
    row_loss: Tensor | None = None
    """(tokens,), as the entropy: each row's loss (or log-probability), 0 for a row that does not count."""
    entropy: Tensor | None = None
    grad_hidden: Tensor | None = None
    """Like the shard's hidden states, summed over the ranks."""
    grad_weight: Tensor | None = None
    """(local vocab, hidden) in the weight's dtype, or fp32 with main_grad."""
    omits_below: float = field(default=0.0, metadata={"constant": True})
    """Probabilities below this one may be left out of the gradients."""


Step: TypeAlias = step.Step[Output]

_HIDDEN, _WEIGHT, _TEACHER, _TEACHER_WEIGHT, _LABELS, _IGNORED, _UPSTREAM = range(100, 114, 2)
"""Random streams of a seed for row indices. The next stream is for column indices."""


def make_shard(problem: LinearLoss, context: Context) -> Shard:
    """Return this rank's inputs. The standard deviation of a random logit is between 1.9 and 3.8.

    With label_logit it is a quarter of that, and each hidden state has a multiple of its label's row of the weight.
    """
    device, parts = context.device, context.tp_size if problem.sequence_parallel else 1
    columns = range(*shard_bounds(problem.vocab, context.tp_size, context.tp_rank))
    rows = range(*shard_bounds(problem.tokens, parts, context.tp_rank % parts))

    def matrix(stream: int, indices: range, scale: float = 1.0) -> Tensor:
        return normal_matrix(problem, (stream, stream + 1), indices, range(problem.hidden), device, scale)

    # A power of two near 1 / (2 sqrt(hidden)) rounds nothing.
    weight_scale = 2.0 ** -round(math.log2(2 * math.sqrt(problem.hidden)))
    has_upstream = problem.loss == "logprob" and problem.trains and problem.objective is None
    target = given_target(problem, (_LABELS, _IGNORED), range(problem.tokens), device)
    if target is None:
        target = matrix(_TEACHER, rows), matrix(_TEACHER_WEIGHT, columns, weight_scale)
    hidden = matrix(_HIDDEN, rows)
    if problem.label_logit:
        indices = target[rows.start : rows.stop].clamp(min=0), torch.arange(problem.hidden, device=device)
        of_label = normal(*(hash_index(problem.seed, _WEIGHT + at, index) for at, index in enumerate(indices)))
        of_label = of_label.double() * weight_scale  # the sum of squares is exact in float64, so equal on any device
        of_label *= problem.label_logit / of_label.square().sum(1, keepdim=True)
        hidden = (hidden / 4 + of_label).to(hidden.dtype)
    return Shard(
        hidden=hidden,
        weight=matrix(_WEIGHT, columns, weight_scale),
        target=target,
        upstream=_upstream(problem, target) if has_upstream else None,
        **place(problem, context),
    )


def _upstream(problem: LinearLoss, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a random upstream gradient of the mean log-probability and one of the mean entropy, for each row."""
    counts = labels != IGNORED
    rows, columns = (
        hash_index(problem.seed, stream, torch.arange(size, device=labels.device))
        for stream, size in ((_UPSTREAM, problem.tokens), (_UPSTREAM + 1, 2))
    )
    of_logprob, of_entropy = normal(rows, columns).mul_((counts / counts.sum().clamp(min=1))[:, None]).unbind(1)
    return of_logprob.contiguous(), of_entropy.contiguous()
