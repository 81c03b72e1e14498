"""The reference of a run, the comparison of a run with it, and the audit of a variant from outside this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tpbench.measure.audit import subclass_reason
from tpbench.measure.inputs import common_seed
from tpbench.workloads import Variant
from tpbench.workloads.returned import require
from tpbench.workloads.train_step.limits import LOSS_TOLERANCE, NORM_TOLERANCE
from tpbench.workloads.train_step.model.inputs import Batch, rolled
from tpbench.workloads.train_step.problem import NORM_GROWTH, TrainStep

LATER_TOLERANCE = {"float32": 5e-4, "bfloat16": 5e-3, "float16": 5e-3}
"""Least tolerance of the median error, by dtype. The largest median error of correct rows on GPUs is 1.5e-3 in bf16
and, with a moderate learning rate on a CPU, 1e-5 in fp32."""
LATER_SHARE = 0.2
"""Tolerance of the median error as a share of what training changes. In tiny models with a far too high learning rate
(1e-2), the losses of correct variants differ by 0.08 of it."""
LATER_OUTLIER = 10.0
"""A single error may be this many times the tolerance of the median error. Right after a spike of the gradient norm,
correct rows differ by up to 1.3e-2 in bf16 and 3e-3 in fp32."""
CHANGED_STEPS = 3
"""Further steps on changed batches: those of the last timed step, rolled."""


@dataclass(frozen=True)
class LaterReference:
    """Correct losses of the timed steps and of changed batches after them. Errors are shares of the first loss.

    Small differences grow with each update, so that later steps are not compared as closely as the first ones. How fast
    they grow depends on the learning rate. The tolerance is therefore a share of what training changes: the difference
    between the correct losses and those of a variant that trains only while it warms up.
    """

    first: float
    """Loss of the first step."""
    last_of_warmup: float
    """Loss of the last step before the timed ones."""
    timed: tuple[float, ...]
    """Losses of the timed steps."""
    changed: tuple[float, ...]
    """Losses of further steps, on changed batches."""
    untrained: tuple[float, ...]
    """Losses of the changed batches with the weights after the warm-up."""

    def complaint(self, timed: Sequence[float], changed: Sequence[float], dtype: str) -> str | None:
        """Return why losses of a run are wrong, or None. `changed` may be empty: those steps have not run yet."""
        return self._complaint("timed steps", self.timed, timed, self._constant, dtype) or (
            self._complaint("changed batches", self.changed, changed, self.untrained, dtype) if changed else None
        )

    def shows_updates(self, dtype: str) -> bool:
        """Return True if a variant that trains only while it warms up is wrong by `complaint`."""
        return bool(self.complaint(self._constant, [], dtype) and self.complaint(self.timed, self.untrained, dtype))

    @property
    def _constant(self) -> list[float]:
        return [self.last_of_warmup] * len(self.timed)

    def _complaint(
        self, what: str, expected: Sequence[float], actual: Sequence[float], untrained: Sequence[float], dtype: str
    ) -> str | None:
        """`untrained`: losses of a variant that trains only while it warms up."""
        errors = self._errors(expected, actual)
        allowed = max(LATER_TOLERANCE[dtype], LATER_SHARE * median(self._errors(expected, untrained)))
        limits = {"median": (median(errors), allowed), "largest": (max(errors), LATER_OUTLIER * allowed)}
        for kind, (error, limit) in limits.items():
            if error > limit:
                return (
                    f"the {kind} error of the losses of the {what} is {error:.3g} of the first loss, above "
                    f"{limit:.3g} ({dtype}): the variant does not train in every step as in the first ones"
                )
        return None

    def _errors(self, expected: Sequence[float], actual: Sequence[float]) -> list[float]:
        errors = [abs(one - other) / self.first for one, other in zip(expected, actual, strict=True)]
        return [error if error == error else float("inf") for error in errors]


@dataclass(frozen=True)
class Reference:
    """Correct losses and gradient norms of the first steps, in order."""

    source: str
    """The computation that gave them."""
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    """Empty if only a forward pass was affordable."""
    later: LaterReference | None = None
    """Losses of the rest of an audited run. None: only the first steps are compared."""


@dataclass(frozen=True)
class ReferenceErrors:
    """Relative errors of a run against the reference."""

    loss_error: float
    norm_errors: tuple[float, ...]
    """One error for each compared step."""

    @property
    def grad_error(self) -> float | None:
        """The largest error of a norm, or None if no norm was compared."""
        return max(self.norm_errors, default=None)

    def complaint(self, dtype: str) -> str | None:
        """Return why the run is wrong, or None."""
        wrong = []
        if not self.loss_error <= LOSS_TOLERANCE[dtype]:
            wrong.append(f"loss_error {self.loss_error:.3g} is above {LOSS_TOLERANCE[dtype]:.3g}")
        for step, error in enumerate(self.norm_errors):
            allowed = NORM_TOLERANCE[dtype] * NORM_GROWTH**step
            if not error <= allowed:
                wrong.append(f"grad_error {error:.3g} of the norm at step {step + 1} is above {allowed:.3g}")
                break
        return f"{' and '.join(wrong)} ({dtype})" if wrong else None


def compare(reference: Reference, losses: Sequence[float], norms: Sequence[float]) -> ReferenceErrors:
    """Return the relative errors of a run, the largest of all losses and each norm's. NaN becomes infinite."""
    return ReferenceErrors(
        max(_relative_errors(reference.losses, losses)), tuple(_relative_errors(reference.norms, norms))
    )


def _relative_errors(reference: Sequence[float], run: Sequence[float]) -> list[float]:
    pairs = zip(reference, run, strict=False)
    errors = [abs(actual - expected) / max(abs(expected), 1e-12) for expected, actual in pairs]
    return [error if error == error else float("inf") for error in errors]


class RunAudit:
    """The observations of one run on one rank.

    A loss is copied as its step ends. The batches of each step are compared with copies. After the timed steps, the
    variant trains on changed batches, whose losses cannot be known before.
    """

    def __init__(self, problem: TrainStep, variant: Variant) -> None:
        """Draw the changed batches. Collective."""
        self.problem, self.variant = problem, variant
        generator = torch.Generator().manual_seed(common_seed())
        rolls = torch.randint(1, problem.seq_length, (CHANGED_STEPS,), generator=generator)
        self.changes: tuple[int, ...] = tuple(rolls.tolist())
        """By how many positions each further step rolls its batches. Equal on all ranks."""
        self.kept: list[Batch] = []
        self.wrote = False
        self.subclass: str | None = None
        """Why a loss or a norm is no plain tensor."""

    def read(self, value: Any) -> Tensor:
        """Return a copy of a loss or a norm, made on the current stream at once: nothing can write it later.

        Raises WrongReturn if the value is no tensor.
        """
        result: Tensor = require(value, Tensor, self.variant, "accumulate or update")
        self.subclass = self.subclass or subclass_reason(result)
        return result.detach().clone()

    def keep(self, batches: Sequence[Batch]) -> None:
        """Copy the batches of the next step."""
        self.kept = rolled(batches, 0)

    def compare(self, batches: Sequence[Batch]) -> None:
        """Note whether the last step wrote to its batches."""
        for batch, kept in zip(batches, self.kept, strict=False):
            same = torch.equal(batch.tokens, kept.tokens) and torch.equal(batch.labels, kept.labels)
            self.wrote = self.wrote or not same

    def complaint(self, reference: Reference, losses: Sequence[float]) -> str | None:
        """Return why the run is wrong on this rank, or None. `losses`: those of all steps so far."""
        if self.wrote:
            return "the variant wrote to its inputs"
        if self.subclass:
            return self.subclass
        if reference.later is None:
            return None
        first, end = self.problem.warmup_steps, self.problem.warmup_steps + self.problem.steps
        return reference.later.complaint(losses[first:end], losses[end:], self.problem.dtype)
