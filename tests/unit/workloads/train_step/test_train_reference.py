"""How a run is compared with its reference."""

import pytest

from tpbench.workloads.train_step.oracle import Reference


def test_the_tolerance_of_norms_grows_with_each_step() -> None:
    """Rounding differences grow with each update. The tolerance of losses is constant."""
    right = Reference("", (9.0, 8.0, 7.0), (2.0, 2.0, 2.0))
    for step, allowed in enumerate((0.02, 0.04, 0.08)):
        for off, fine in ((allowed * 0.9, True), (allowed * 1.1, False), (float("nan"), False)):
            norms = [*right.norms]
            norms[step] *= 1 + off
            complaint = right.complaint(right.losses, norms, "bfloat16")
            assert (complaint is None) is fine
            place = f"the gradient norm of step {step + 1} is {norms[step]:.6g}, expected 2"
            assert fine or str(complaint).endswith(f"above {allowed:g} (bfloat16): {place}")
        losses = [*right.losses]
        losses[step] *= 1.003
        assert f"the loss of step {step + 1} is " in str(right.complaint(losses, right.norms, "bfloat16"))


def test_a_run_that_diverges_later_is_wrong() -> None:
    """With such a learning rate the reference has only the first step's loss."""
    forward = Reference("", [7.0])
    assert forward.complaint([7.0, 6.0, 5.0], [2.0, 2.0, 2.0], "float32") is None
    said = forward.complaint([7.0, 6.0, 5.0], [2.0, float("nan"), float("nan")], "float32")
    assert str(said).startswith("step 2 has a loss of 6 and a gradient norm of nan: ")


SLOW = Reference("", (10.0, 9.97, 9.96, 9.95, 9.94), timed_from=2)
"""Training changes so little that the least tolerance counts."""
FAST = Reference("", (10.0, 9.0, 8.0, 7.0, 6.0), timed_from=2)
"""Training changes the losses by 0.2 of the first one in the median."""
LONG = Reference("", (10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0), timed_from=2)


@pytest.mark.parametrize(
    ("reference", "dtype", "losses", "begin"),
    [
        (SLOW, "float32", [9.964, 9.954, 9.944], None),
        (SLOW, "float32", [9.966, 9.956, 9.94], "the median error of the losses of the timed steps is 0.0006 of"),
        (SLOW, "float32", [9.96, 9.95, 9.985], None),  # right after a spike
        (SLOW, "float32", [9.96, 9.95, 10.0], "the largest error of the losses of the timed steps is 0.006 of"),
        (SLOW, "bfloat16", [10.0, 9.99, 9.98], None),
        (FAST, "float32", [8.3, 7.3, 6.3], None),
        # The last updates are left out.
        (LONG, "float32", [8.0, 7.0, 6.0, 6.0, 6.0, 6.0], "the median error of the losses of the second half of the"),
        (FAST, "bfloat16", [8.5, 7.5, 6.5], "the median error of the losses of the timed steps is 0.05 of"),
        (FAST, "bfloat16", [8.0, float("nan"), 6.0], "the largest error of the losses of the timed steps is inf"),
    ],
)
def test_timed_losses_are_compared_in_the_median(
    reference: Reference, dtype: str, losses: list[float], begin: str | None
) -> None:
    complaint = reference.timed_complaint([*reference.losses[:2], *losses], dtype)
    assert (complaint is None) == (begin is None) and (complaint or "").startswith(begin or "")
