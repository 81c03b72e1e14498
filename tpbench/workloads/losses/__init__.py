"""What the entropy loss and the linear loss share: a loss over a vocabulary that is sharded over ranks.

An entropy loss is a linear loss whose logits are given. So both have the same losses from labels and from target
logits, random labels and matrices, row-wise float64 oracle, and losses in torch operations. This module doesn't import
torch: it says which problems the losses of other projects cannot do.
"""

from __future__ import annotations

from typing import Any

from tpbench.kernels import LABEL_LOSSES


def complaints(problem: Any, tp_size: int) -> list[str]:
    """Return a complaint for each combination of the fields of both losses that is invalid."""
    found = []
    from_labels, loss = problem.loss in LABEL_LOSSES, problem.loss
    if problem.vocab < tp_size:
        found.append(f"vocab={problem.vocab} cannot be sharded over tp_size={tp_size}: some rank would hold nothing")
    if loss == "cross_entropy" and problem.temperature != 1.0:
        found.append(
            f"temperature={problem.temperature} divides target logits, or those of logprob and policy: "
            "loss=cross_entropy has none"
        )
    if not from_labels and problem.ignored:
        found.append(f"ignored={problem.ignored} needs labels: only {', '.join(LABEL_LOSSES)} have them")
    if problem.kl_weight and loss != "policy":
        found.append(f"kl_weight={problem.kl_weight} is a term of loss=policy")
    if problem.top_k and (from_labels or loss == "jsd" or problem.top_k > problem.vocab):
        found.append(f"top_k={problem.top_k} needs a loss against target logits but jsd, and as many columns")
    return found


def uneven(problem: Any, tp_size: int) -> str | None:
    """Return why a loss that needs shards of one size cannot do the problem, or None if it can."""
    if problem.vocab % tp_size:
        return f"it needs a vocab that tp_size divides, got {problem.vocab} and {tp_size}"
    return None


SEQUENCE = 256
"""Rows of a sequence of the policy loss, which have one advantage."""


def bytes_of_rows(problem: Any) -> int:
    """Return the bytes of labels, of a teacher's top k, and of the other numbers of rows."""
    labels = 8 * (problem.loss in LABEL_LOSSES)
    policy = 4 * (2 + (problem.kl_weight > 0)) if problem.loss == "policy" else 0
    return int(problem.tokens * (labels + policy + 12 * problem.top_k))


def sequences_only(problem: Any) -> str | None:
    """Return why a policy loss with an advantage of each sequence cannot do the problem, or None if it can."""
    if problem.tokens % SEQUENCE:
        return f"it needs tokens of whole sequences of {SEQUENCE}, got {problem.tokens}"
    return None


def no_other_loss(problem: Any) -> str | None:
    """Return why a cross-entropy cannot do the problem, or None if it can."""
    return None if problem.loss == "cross_entropy" else f"it has no {problem.loss}, only cross_entropy"


def labels_only(problem: Any) -> str | None:
    """Return why a cross-entropy that divides by the number of rows cannot do the problem, or None if it can."""
    return no_other_loss(problem) or (
        "it divides by zero where every row is ignored" if problem.ignored == 1.0 else None
    )
