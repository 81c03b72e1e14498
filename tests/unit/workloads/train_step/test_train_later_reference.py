"""The comparison of later losses of a run with the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tpbench.workloads.train_step.reference import LaterReference

SLOW = LaterReference(10.0, 9.97, timed=(9.96, 9.95, 9.94))
"""Training changes so little that the least tolerance counts."""
FAST = LaterReference(10.0, 9.0, timed=(8.0, 7.0, 6.0))
"""Training changes the timed losses by 0.2 of the first one in the median."""
NOT_TRAINED = "the variant does not train in every step as in the first ones"


@pytest.mark.parametrize(
    ("reference", "dtype", "timed", "begin"),
    [
        (SLOW, "float32", [9.964, 9.954, 9.944], None),
        (SLOW, "float32", [9.966, 9.956, 9.94], "the median error of the losses of the timed steps is 0.0006 of"),
        (SLOW, "float32", [9.96, 9.956, 9.94], None),
        (SLOW, "float32", [9.96, 9.95, 9.985], None),  # right after a spike
        (SLOW, "float32", [9.96, 9.95, 10.0], "the largest error of the losses of the timed steps is 0.006 of"),
        (SLOW, "bfloat16", [10.0, 9.99, 9.98], None),
        (FAST, "float32", [8.3, 7.3, 6.3], None),
        (FAST, "bfloat16", [8.5, 7.5, 6.5], "the median error of the losses of the timed steps is 0.05 of"),
        (FAST, "bfloat16", [8.0, float("nan"), 6.0], "the largest error of the losses of the timed steps is inf"),
    ],
)
def test_later_losses_are_compared_in_the_median(
    reference: LaterReference, dtype: str, timed: list[float], begin: str | None
) -> None:
    complaint = reference.complaint(timed, dtype)
    assert (complaint is None) == (begin is None) and (complaint or "").startswith(begin or "")
    assert begin is None or (complaint or "").endswith(NOT_TRAINED)


def test_losses_of_old_weights_must_be_wrong() -> None:
    assert FAST.shows_updates("float32") and FAST.shows_updates("bfloat16")
    assert SLOW.shows_updates("float32") and not SLOW.shows_updates("bfloat16")
    assert not replace(FAST, last_of_warmup=7.0, timed=(7.01, 7.0, 6.99)).shows_updates("bfloat16")
