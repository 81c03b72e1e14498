"""What the entropy loss and the linear loss share: a loss over a vocabulary that is sharded over ranks.

An entropy loss is a linear loss whose logits are given. So both have the same losses from labels and from target
logits, random labels and matrices, row-wise float64 oracle, and losses in torch operations. This module doesn't import
torch: it has what both problems are, and says which of them the losses of other projects cannot do.
"""

from __future__ import annotations

from tpbench.kernels import LABEL_LOSSES


class LossProblem:
    """What the problems of both losses have: fields, and the defaults of those that only one of them has."""

    tokens: int
    vocab: int
    loss: str
    seed: int
    temperature: float
    ignored: float
    top_k: int
    kl_weight: float
    logits_scale = 1.0
    compute_dtype = "float32"
    entropy = False

    @property
    def from_labels(self) -> bool:
        """True if the targets are labels, false if they are target logits or a top k."""
        return self.loss in LABEL_LOSSES

    @property
    def matrices(self) -> int:
        """Matrices of logits: with target logits two."""
        return 1 if self.from_labels or self.top_k else 2

    @property
    def target_scale(self) -> float:
        """Factor on the target logits."""
        return self.logits_scale / self.temperature

    @property
    def scale(self) -> float:
        """Factor on the logits. A temperature divides them only if there are no target logits."""
        return self.target_scale if self.from_labels else self.logits_scale

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """Return a complaint for each combination of fields that is invalid."""
        found, loss = [], self.loss
        if self.vocab < tp_size:
            found.append(f"vocab={self.vocab} cannot be sharded over tp_size={tp_size}: some rank would hold nothing")
        if loss == "cross_entropy" and self.temperature != 1.0:
            found.append(
                f"temperature={self.temperature} divides target logits, or those of logprob and policy: "
                "loss=cross_entropy has none"
            )
        if not self.from_labels and self.ignored:
            found.append(f"ignored={self.ignored} needs labels: only {', '.join(LABEL_LOSSES)} have them")
        if self.kl_weight and loss != "policy":
            found.append(f"kl_weight={self.kl_weight} is a term of loss=policy")
        if self.top_k and (self.from_labels or loss == "jsd" or self.top_k > self.vocab):
            found.append(f"top_k={self.top_k} needs a loss against target logits but jsd, and as many columns")
        return found


def uneven(problem: LossProblem, tp_size: int) -> str | None:
    """Return why a loss that needs shards of one size cannot do the problem, or None if it can."""
    if problem.vocab % tp_size:
        return f"it needs a vocab that tp_size divides, got {problem.vocab} and {tp_size}"
    return None


SEQUENCE = 256
"""Rows of a sequence of the policy loss, which have one advantage."""


def bytes_of_rows(problem: LossProblem) -> int:
    """Return the bytes of labels, of a teacher's top k, and of the other numbers of rows."""
    labels = 8 * problem.from_labels
    policy = 4 * (2 + (problem.kl_weight > 0)) if problem.loss == "policy" else 0
    return int(problem.tokens * (labels + policy + 12 * problem.top_k))


def sequences_only(problem: LossProblem) -> str | None:
    """Return why a policy loss with an advantage of each sequence cannot do the problem, or None if it can."""
    if problem.tokens % SEQUENCE:
        return f"it needs tokens of whole sequences of {SEQUENCE}, got {problem.tokens}"
    return None


def no_other_loss(problem: LossProblem) -> str | None:
    """Return why a cross-entropy cannot do the problem, or None if it can."""
    return None if problem.loss == "cross_entropy" else f"it has no {problem.loss}, only cross_entropy"


def labels_only(problem: LossProblem) -> str | None:
    """Return why a cross-entropy from labels cannot do the problem, or None if it can.

    Those of other projects divide by the number of rows, and have no scale of the logits.
    """
    if reason := no_other_loss(problem):
        return reason
    if problem.ignored == 1.0:
        return "it divides by zero where every row is ignored"
    return "it has no logits_scale" if problem.logits_scale != 1.0 else None


def labels_on_one_rank(problem: LossProblem, tp_size: int) -> str | None:
    """Return why a cross-entropy for one rank cannot do the problem, or None if it can."""
    return "it is for one GPU" if tp_size > 1 else labels_only(problem)


def labels_of_even_shards(problem: LossProblem, tp_size: int) -> str | None:
    """Return why a cross-entropy that needs shards of one size cannot do the problem, or None if it can."""
    return uneven(problem, tp_size) or labels_only(problem)
