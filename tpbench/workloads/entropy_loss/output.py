"""What a variant hands back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Output:
    """One iteration's result on one rank."""

    loss: Tensor
    """fp32 scalar: the mean over the rows that count, 0 if none does."""
    row_loss: Tensor | None
    """(tokens,): each row's loss, 0 where it does not count; None from a variant that makes the mean alone."""
    grad: Tensor
    """(tokens, local vocab) in the logits' dtype: of `loss` by the local logits, but for `grad_factor`."""
    grad_factor: Tensor | float = 1.0
    """What `grad` is still to be multiplied by, a scalar: 1 / rows that count, of a kernel that makes the sum's one
    and leaves the factor to whatever reads it."""


@dataclass(frozen=True)
class Step:
    """A variant ready to run: calling it is one iteration."""

    run: Callable[[], Output]
    bytes_communicated: int | Callable[[], int] = 0
    """Bytes that this rank sends in an iteration; a function where only an iteration shows it."""
    columns: Callable[[], Mapping[str, Any]] = dict
    """What a row says besides of how it ran, known after an iteration. The same on every rank."""
    restore: Callable[[], None] | None = None
    """Makes the inputs what they were, after a variant that writes over them. Not timed."""

    def __call__(self) -> Output:
        return self.run()
