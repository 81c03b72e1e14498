"""Which reference a run gets, and how a run is compared with it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.train_step import single_context, tiny_problem
from tpbench.workloads.train_step import TrainStep, oracle
from tpbench.workloads.train_step.oracle import Reference, Trained, compute_reference

GIB = 2**30
CONTEXT = replace(single_context(), dp_size=2)
FORWARD = "loss of the first step by a forward pass"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the calls of what would train and measure. It takes 70 of 100 GiB, and all operations that are allowed."""
    calls: list[Any] = []

    def train(problem: TrainStep, steps: int, context: Any) -> Trained:
        calls.append(("train", steps, problem))
        return [1.0 + step for step in range(steps)], [1.0 + steps + step for step in range(steps)]

    monkeypatch.setattr(oracle, "train_first_steps", train)
    monkeypatch.setattr(oracle, "first_loss", lambda problem, context: 7.0)
    monkeypatch.setattr(oracle, "estimate_memory", lambda *_: SimpleNamespace(total=70 * GIB))
    monkeypatch.setattr(oracle.rank_memory, "available_bytes", lambda device: 100 * GIB)
    monkeypatch.setattr(oracle, "step_flops", lambda problem: 2e12 / 6)
    return calls


def cell(**fields: Any) -> TrainStep:
    return tiny_problem(**{"warmup_steps": 2, "steps": 6, **fields})


def test_what_is_affordable_is_trained_by_rank_0(log: list[Any]) -> None:
    reference = compute_reference(cell(activation_checkpointing=False, train_loss="tpbench"), CONTEXT)
    assert reference == Reference("3 steps by one process", [1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    _, steps, plain = log[0]
    assert (steps, plain.activation_checkpointing, plain.compile, plain.train_loss) == (3, True, False, "torch")
    log.clear()
    compute_reference(cell(), replace(CONTEXT, rank=1))
    assert not log
    assert len(compute_reference(cell(warmup_steps=1, steps=1), CONTEXT).losses) == 2


@pytest.mark.parametrize("much", ["memory", "operations", "infinite losses"])
def test_what_costs_too_much_is_a_forward_pass(much: str, log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if much == "memory":
        monkeypatch.setattr(oracle.rank_memory, "available_bytes", lambda device: 100 * GIB - 2)
    elif much == "operations":
        monkeypatch.setattr(oracle, "step_flops", lambda problem: 2e12 / 6 + 1)
    else:
        monkeypatch.setattr(oracle, "train_first_steps", lambda *_: None)
    assert compute_reference(cell(), CONTEXT) == Reference(FORWARD, [7.0])


@pytest.mark.parametrize(
    ("flops", "source"),
    [
        (2e12 / 16, "all 8 steps by one process"),
        (2e12 / 15, "3 steps by one process; later steps are not checked"),
        (2e12, f"{FORWARD}; later steps are not checked"),
    ],
)
def test_a_variant_from_outside_is_compared_with_the_whole_run(
    flops: float, source: str, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "step_flops", lambda problem: flops)
    reference = compute_reference(cell(), CONTEXT, whole_run=True)
    assert reference.source == source
    if source.startswith("all"):
        assert reference.losses == [1.0 + step for step in range(8)] and reference.timed_from == 2
        monkeypatch.setattr(oracle, "train_first_steps", lambda *_: ([9.0] * 8, [9.0] * 8))
        constant = compute_reference(cell(), CONTEXT, whole_run=True)
        assert constant.source == "all 8 steps by one process; skipped updates would not show"


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
    forward = Reference(FORWARD, [7.0])
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
