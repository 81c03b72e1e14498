"""What a variant of the linear loss gets and returns: this rank's shard, the output of an iteration, and its step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from tpbench.workloads import step

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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


@dataclass(frozen=True)
class Output:
    """One iteration's result on one rank."""

    loss: Tensor
    """fp32 scalar: the mean loss (or log-probability) over the rows that count, 0 if none counts."""
    row_loss: Tensor | None = None
    """(tokens,): each row's loss (or log-probability), 0 for a row that does not count. None if it is not computed."""
    entropy: Tensor | None = None
    """(tokens,): each row's entropy, 0 for a row that does not count."""
    grad_hidden: Tensor | None = None
    """Like the shard's hidden states, summed over the ranks."""
    grad_weight: Tensor | None = None
    """(local vocab, hidden) in the weight's dtype, or fp32 with main_grad."""


Step: TypeAlias = step.Step[Output]
"""A variant ready to run."""
