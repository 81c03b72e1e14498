"""The reference of a run, and the comparison of a run with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tpbench.workloads.train_step.limits import LOSS_TOLERANCE, NORM_TOLERANCE
from tpbench.workloads.train_step.problem import NORM_GROWTH

LATER_TOLERANCE = {"float32": 5e-4, "bfloat16": 5e-3, "float16": 5e-3}
"""Least tolerance of the median error, by dtype. The largest median error of correct rows on GPUs is 1.5e-3 in bf16
and, with a moderate learning rate on a CPU, 1e-5 in fp32."""
LATER_SHARE = 0.2
"""Tolerance of the median error as a share of what training changes. In tiny models with a far too high learning rate
(1e-2), the losses of correct variants differ by 0.08 of it."""
LATER_OUTLIER = 10.0
"""A single error may be this many times the tolerance of the median error. Right after a spike of the gradient norm,
correct rows differ by up to 1.3e-2 in bf16 and 3e-3 in fp32."""


@dataclass(frozen=True)
class LaterReference:
    """Correct losses of the timed steps. Errors are shares of the first loss.

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

    def complaint(self, timed: Sequence[float], dtype: str) -> str | None:
        """Return why the losses of a run's timed steps are wrong, or None."""
        errors = self._errors(timed)
        allowed = max(LATER_TOLERANCE[dtype], LATER_SHARE * median(self._errors(self._untrained)))
        limits = {"median": (median(errors), allowed), "largest": (max(errors), LATER_OUTLIER * allowed)}
        for kind, (error, limit) in limits.items():
            if error > limit:
                return (
                    f"the {kind} error of the losses of the timed steps is {error:.3g} of the first loss, above "
                    f"{limit:.3g} ({dtype}): the variant does not train in every step as in the first ones"
                )
        return None

    def shows_updates(self, dtype: str) -> bool:
        """Return True if a variant that trains only while it warms up is wrong by `complaint`."""
        return self.complaint(self._untrained, dtype) is not None

    @property
    def _untrained(self) -> list[float]:
        """The losses of a variant that trains only while it warms up."""
        return [self.last_of_warmup] * len(self.timed)

    def _errors(self, losses: Sequence[float]) -> list[float]:
        errors = [abs(loss - expected) / self.first for loss, expected in zip(losses, self.timed, strict=True)]
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
    """Losses of the rest of the run. None: only the first steps are compared."""


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
