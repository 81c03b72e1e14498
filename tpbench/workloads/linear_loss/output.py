"""The result of a variant's iteration, and a variant that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from tpbench.workloads import step


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
