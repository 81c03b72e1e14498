"""Interface of a workload's cost model: `tpbench.predict` fits it to measured rows.

A cost model counts what an implementation does, such as the bytes that a rank works on. It knows no row format and no
fitting: `tpbench.predict` finds how long a counted unit takes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

ProblemSize: TypeAlias = Any
"""The part of a problem that its cost depends on: a frozen dataclass. `str(size)` describes it in one line.

Every field has a default, and is an option of `scripts/predict.py`; its help is that of the problem's field. Two are
`tokens` (rows of a replica) and `tp_size`. `inputs_gib` is the memory of one rank's inputs. Problems of one `kind`
share coefficients: a kind without measured rows cannot be predicted.
"""

Terms: TypeAlias = Mapping[str, float]
"""Counted terms of a cost by name. A fit multiplies each with a coefficient that is not negative.

Names of communication terms start with `collective`. Names of terms that a GPU's memory bandwidth limits start with
`bytes`."""


@dataclass(frozen=True)
class Counts:
    """What one variant does on one problem."""

    memory: Terms
    """Terms of the extra peak memory of a rank."""
    sent: Terms
    """Terms of the bytes that the busiest rank sends. No terms: nothing is sent."""
    time: Terms
    """Terms of the device time."""


@dataclass(frozen=True)
class Question:
    """The question that a prediction answers in its first sentence: should one use this variant?"""

    variant: str
    subject: str
    """The variant as the subject of a sentence."""
    action: str
    """A verb: "do not" stands before it if the variant is slower."""


@dataclass(frozen=True)
class CostModel:
    """The counted cost of one workload's iteration."""

    size: type
    """A `ProblemSize`."""
    size_of: Callable[[Mapping[str, Any]], Any | None]
    """Return the size of a row or of a job's flat fields, or None if one is missing or unknown."""
    counts: Callable[[str, Any], Counts]
    """Return what a variant does on a problem of this size. The first argument is its name, then its options, such as
    `pytorch_tp_manual exchange=all_reduce`."""
    tuning_options: tuple[str, ...] = ()
    """Options that tune a kernel. A row that sets one is not fitted. A job that sets one is predicted as if it did
    not."""
    question: Question | None = None
