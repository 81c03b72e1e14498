"""The reference of a run, and the comparison of a run with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpbench.workloads.train_step.correctness.later_reference import LaterReference
from tpbench.workloads.train_step.limits import LOSS_TOLERANCE, NORM_TOLERANCE
from tpbench.workloads.train_step.problem import NORM_GROWTH


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
