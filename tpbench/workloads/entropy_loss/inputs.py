"""What a variant of the entropy loss gets and returns, and the random inputs: the same logits at any world size."""

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from tpbench.measure.session import Context
from tpbench.workloads import step
from tpbench.workloads.entropy_loss.problem import EntropyLoss
from tpbench.workloads.losses.inputs import LossShard, given_target, normal_matrix, place
from tpbench.workloads.sizes import shard_bounds


@dataclass(frozen=True, kw_only=True)
class Shard(LossShard):
    """One rank's part of the problem."""

    logits: Tensor
    """(tokens, local vocab) in the problem's dtype."""


@dataclass(frozen=True)
class Output:
    """One iteration's result on one rank."""

    loss: Tensor
    """fp32 scalar: the mean loss over the rows that count, 0 if none counts."""
    row_loss: Tensor | None
    """(tokens,): each row's loss, 0 for a row that does not count. None if the variant computes only the mean."""
    grad: Tensor
    """(tokens, local vocab) in the logits' dtype. The gradient of `loss` by the local logits is grad * grad_factor."""
    grad_factor: Tensor | float = field(default=1.0, metadata={"constant": True})
    """Scalar: 1 / rows that count for a kernel that computes the gradient of the sum, else 1."""
    entropy: Tensor | None = None
    """(tokens,): each row's entropy, 0 for a row that does not count, if the problem asks for it."""


Step: TypeAlias = step.Step[Output]

_LOGITS, _TARGET_LOGITS, _LABELS, _IGNORED = range(1, 5)
"""Streams of independent numbers from one seed. Those of column indices are `_COLUMNS` further."""
_COLUMNS = 16


def make_shard(problem: EntropyLoss, context: Context) -> Shard:
    """Return this rank's inputs. Data-parallel replicas have the same rows."""
    columns = range(*shard_bounds(problem.vocab, context.tp_size, context.tp_rank))
    rows, device = range(problem.tokens), context.device

    def matrix(stream: int) -> Tensor:
        return normal_matrix(problem, (stream, stream + _COLUMNS), rows, columns, device)

    target = given_target(problem, (_LABELS, _IGNORED), rows, device)
    target = matrix(_TARGET_LOGITS) if target is None else target
    return Shard(logits=matrix(_LOGITS), target=target, **place(problem, context))
