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
    row_loss: Tensor | None = None
    """(tokens,): each row's loss, 0 for a row that does not count. None if the variant computes only the mean."""
    entropy: Tensor | None = None
    """(tokens,): each row's entropy, 0 for a row that does not count."""
    grad_hidden: Tensor | None = None
    """Like the shard's hidden states, summed over the ranks."""
    grad_weight: Tensor | None = None
    """(local vocab, hidden) in the weight's dtype, or fp32 with main_grad."""


@dataclass(frozen=True)
class Step:
    """A variant ready to run: calling it is one iteration."""

    run: Callable[[], Output]
    bytes_communicated: int | Callable[[], int] = 0
    """Bytes that this rank sends in an iteration. A function if only an iteration shows the number."""
    columns: Callable[[], Mapping[str, Any]] = dict
    """Return further columns of the row, after an iteration. They are equal on every rank."""
    restore: Callable[[], None] | None = None
    """Restore what an iteration changes. This is not timed."""

    def __call__(self) -> Output:
        return self.run()
