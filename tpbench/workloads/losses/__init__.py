"""What the entropy loss and the linear loss share: a loss over a vocabulary that is sharded over ranks.

This module, without torch, has what both problems are, and what of them the losses of other projects cannot do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from tpbench.columns import Column
from tpbench.kernels import COMPARING_LOSSES, LABEL_LOSSES, KernelLoss
from tpbench.settings import setting
from tpbench.workloads import Workload

LOSS_COLUMNS = (
    Column("loss_identical", bool, "true if all ranks had the same bits in every loss"),
    Column("row_loss_error", float, "largest error of a row's loss, if the variant returns them", better=0),
    Column("entropy_error", float, "largest error of a row's entropy against the float64 oracle"),
)
LARGEST_SCALE = {"bfloat16": 4.0, "float16": 32.0, "float32": 1024.0}
"""By the dtype to which variants may round logits, the largest factor on them that leaves errors to be found."""


@dataclass(frozen=True)
class LossProblem:
    """The fields that the problems of both losses have, and the defaults of those that only one of them has."""

    tokens: int = setting(help="rows of logits or of hidden states, per data-parallel replica", low=1)
    vocab: int = setting(help="columns of logits over all tensor-parallel ranks", low=1)
    loss: KernelLoss = setting("cross_entropy", help="a loss from labels, or against target logits (a teacher's)")
    dtype: Literal["bfloat16", "float16", "float32"] = setting("bfloat16", help="dtype of inputs and gradients")
    seed: int = setting(0, help="seed of the inputs", low=0, high=2**31 - 1)
    temperature: float = setting(
        1.0, help="divisor of the target logits, or for logprob and policy of the logits", low=1e-6
    )
    ignored: float = setting(0.0, help="share of rows whose label is ignored", low=0.0, high=1.0)
    top_k: int = setting(0, help="columns of a teacher's top k, instead of all target logits; 0: all", low=0, high=1024)
    kl_weight: float = setting(0.0, help="policy: weight of the divergence from a reference policy", low=0.0)
    entropy: bool = setting(False, help="compute each row's entropy too", option="skipped")

    mode = "train"
    logits_scale = 1.0
    compute_dtype = "float32"
    objective = cast("str | None", None)
    label_smoothing = z_loss = softcap = entropy_weight = cast("float | None", None)

    @property
    def is_policy(self) -> bool:
        """True if the loss is of ratios to other log-probabilities: the rows have those, and advantages."""
        return self.loss == "policy" or self.objective is not None

    @property
    def trains(self) -> bool:
        return self.mode == "train"

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
        return self.logits_scale / self.temperature

    @property
    def scale(self) -> float:
        """Factor on the logits. A temperature divides them only if there are no target logits."""
        return self.target_scale if self.from_labels else self.logits_scale

    @property
    def largest_scale(self) -> float:
        """The larger factor on logits: their rounding errors grow with it."""
        return max(self.scale, self.target_scale)

    @property
    def rounded_to(self) -> str:
        """The dtype to which a right variant may round the logits that it computes with."""
        return "float32" if self.compute_dtype == "float32" else self.dtype

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """Return a complaint for each combination of fields that is invalid."""
        complaints, loss = [], self.loss
        if self.largest_scale > (most := LARGEST_SCALE[self.rounded_to]):
            factors = {"temperature": self.temperature, "logits_scale": self.logits_scale}
            named = " and ".join(f"{name}={value}" for name, value in factors.items() if value != 1.0)
            complaints.append(
                f"{named} would multiply logits by {self.largest_scale:g}, which must be at most {most:g} where they "
                f"are rounded to {self.rounded_to}: beyond it rounding hides errors"
            )
        if self.vocab < tp_size:
            complaints.append(f"vocab={self.vocab} cannot be sharded over {tp_size=}: some rank would hold nothing")
        if loss == "cross_entropy" and self.temperature != 1.0:
            whose = "target logits, or those of logprob and policy"
            complaints.append(f"temperature={self.temperature} divides {whose}: loss=cross_entropy has none")
        if not self.from_labels and self.ignored:
            complaints.append(f"ignored={self.ignored} needs labels: only {', '.join(LABEL_LOSSES)} have them")
        if self.kl_weight and loss != "policy":
            complaints.append(f"kl_weight={self.kl_weight} is a term of loss=policy")
        if self.top_k and (self.from_labels or loss in COMPARING_LOSSES or self.top_k > self.vocab):
            valid = "soft_cross_entropy, forward_kl or reverse_kl"
            complaints.append(f"top_k={self.top_k} needs loss={valid}, and a vocab of at least {self.top_k}")
        return complaints


DIFFERENTIATED_PARAMETERS = ("logprobs", "entropy")
"""Parameters with a gradient. A user's own loss has at least one of them."""
OBJECTIVE_PARAMETERS = (*DIFFERENTIATED_PARAMETERS, "sequences", "old_logprobs", "ref_logprobs", "advantages", "mask")
"""The parameters that a user's own loss may have. Others need a default."""
SEQUENCE = 256
"""Rows of a sequence of the policy loss, which have one advantage."""


def bytes_of_rows(problem: LossProblem) -> int:
    """Return the bytes of labels, of a teacher's top k, and of the other numbers of rows."""
    labels = 8 * problem.from_labels
    policy = 4 * (2 + (problem.kl_weight > 0)) if problem.loss == "policy" else 0
    return int(problem.tokens * (labels + policy + 12 * problem.top_k))


Refusal: TypeAlias = Callable[[Any, int], str | None]
"""Return why a variant cannot run a problem on tp_size ranks, or None if it can."""


def first_of(*refusals: Refusal) -> Refusal:
    """Return the refusal that gives the first reason of these."""
    return lambda problem, tp_size: next(filter(None, (refusal(problem, tp_size) for refusal in refusals)), None)


def one_rank(problem: LossProblem, tp_size: int) -> str | None:
    """Refuse a rank alone."""
    return None if tp_size > 1 else "it needs a group of ranks"


def uneven(problem: LossProblem, tp_size: int) -> str | None:
    """Refuse shards of different sizes."""
    rest = problem.vocab % tp_size
    return f"it needs a vocab that tp_size divides, got {problem.vocab} and {tp_size}" if rest else None


def incomplete_sequences(problem: LossProblem, tp_size: int) -> str | None:
    """Refuse rows that don't fill whole sequences, each with an advantage."""
    rest = problem.tokens % SEQUENCE
    return f"it needs tokens of whole sequences of {SEQUENCE}, got {problem.tokens}" if rest else None


def other_losses(problem: LossProblem, tp_size: int) -> str | None:
    """Refuse losses other than cross-entropy."""
    return None if problem.loss == "cross_entropy" else f"it has no {problem.loss}, only cross_entropy"


def labels_only(problem: LossProblem, tp_size: int) -> str | None:
    """Refuse what the cross-entropies of other projects lack: they divide by the number of rows."""
    if problem.ignored == 1.0:
        return "it divides by zero where every row is ignored"
    return other_losses(problem, tp_size) or (None if problem.logits_scale == 1.0 else "it has no logits_scale")


labels_on_one_rank = first_of(lambda problem, ranks: "it is for one GPU" if ranks > 1 else None, labels_only)
labels_of_even_shards = first_of(uneven, labels_only)
labels_over_ranks = first_of(one_rank, labels_of_even_shards)


def peer(workload: Workload, name: str, requires: str, refusal: Refusal, summary: str, **traits: Any) -> None:
    """Declare a loss of another project, which `requires` packages: the function in `adapters`, by default for GPUs."""
    function = f"adapters.{name.removeprefix('linear_')}"
    traits = {"requires": tuple(requires.split()), "requires_cuda": True, "unsupported_reason": refusal, **traits}
    workload.variant_of(name, function, summary, **traits)
