"""The result of a variant's iteration, and a variant that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from tpbench.workloads import step


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
