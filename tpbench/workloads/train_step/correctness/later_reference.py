"""Correct losses of a whole run, with which those of a variant from outside this package are compared.

Small differences grow with each update, so that later steps are not compared as closely as the first ones. How fast
they grow depends on the learning rate. The tolerance is therefore a share of what training changes: the difference
between the correct losses and those of a variant that trains only while it warms up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

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
    """Correct losses of the timed steps and of changed batches after them. Errors are shares of the first loss."""

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
