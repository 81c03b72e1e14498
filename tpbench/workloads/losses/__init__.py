"""What the entropy loss and the linear loss share: a loss over a vocabulary that is sharded over ranks.

An entropy loss is a linear loss whose logits are given. So both have the same losses from labels and from target
logits, random labels and matrices, row-wise float64 oracle, and losses in torch operations. This module doesn't import
torch: it says which problems the losses of other projects cannot do.
"""

from __future__ import annotations

from typing import Any


def uneven(problem: Any, tp_size: int) -> str | None:
    """Return why a loss that needs shards of one size cannot do the problem, or None if it can."""
    if problem.vocab % tp_size:
        return f"it needs a vocab that tp_size divides, got {problem.vocab} and {tp_size}"
    return None


def no_other_loss(problem: Any) -> str | None:
    """Return why a cross-entropy cannot do the problem, or None if it can."""
    return f"it has no {problem.loss}, only cross_entropy" if problem.loss != "cross_entropy" else None


def labels_only(problem: Any) -> str | None:
    """Return why a cross-entropy that divides by the number of rows cannot do the problem, or None if it can."""
    return no_other_loss(problem) or (
        "it divides by zero where every row is ignored" if problem.ignored == 1.0 else None
    )
