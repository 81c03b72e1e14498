"""The result of a variant's iteration, and a variant that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Output:
    """One iteration's result on one rank."""

    loss: Tensor
    """fp32 scalar: the mean loss over the rows that count, 0 if none counts."""
    row_loss: Tensor | None
    """(tokens,): each row's loss, 0 for a row that does not count. None if the variant computes only the mean."""
    grad: Tensor
    """(tokens, local vocab) in the logits' dtype. The gradient of `loss` by the local logits is grad * grad_factor."""
    grad_factor: Tensor | float = 1.0
    """Scalar: 1 / rows that count for a kernel that computes the gradient of the sum, else 1."""


@dataclass(frozen=True)
class Step:
    """A variant ready to run: calling it is one iteration."""

    run: Callable[[], Output]
    bytes_communicated: int | Callable[[], int] = 0
    """Bytes that this rank sends in an iteration. A function if only an iteration shows the number."""
    columns: Callable[[], Mapping[str, Any]] = dict
    """Return further columns of the row, after an iteration. They are equal on every rank."""
    restore: Callable[[], None] | None = None
    """Restore the inputs if the variant overwrites them. This is not timed."""

    def __call__(self) -> Output:
        return self.run()
