"""What a variant of the entropy loss gets and returns: this rank's shard, the output of an iteration, and its step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from tpbench.workloads import step

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Shard:
    """One rank's part of the problem."""

    logits: Tensor
    """(tokens, local vocab) in the problem's dtype."""
    target: Tensor
    """Labels, (tokens,) int64 of the whole vocabulary, or target logits like the logits."""
    vocab_start: int
    """The first column that this rank holds."""
    vocab_size: int
    """Columns over all ranks."""
    group: ProcessGroup | None
    """The ranks that hold the vocabulary. None if one rank holds all of it."""
    tp_rank: int
    tp_size: int

    @property
    def tokens(self) -> int:
        return self.logits.shape[0]

    @property
    def columns(self) -> int:
        """Columns that this rank holds."""
        return self.logits.shape[1]

    @property
    def vocab_stop(self) -> int:
        return self.vocab_start + self.columns

    @property
    def device(self) -> torch.device:
        return self.logits.device


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


Step: TypeAlias = step.Step[Output]
"""A variant ready to run."""
