"""Checks against variants that do less when they are timed: on one process, with sessions that double their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.lone_rank import lone_rank
from tests.support.sleeping_sessions import cpu_context
from tpbench.measure import audit as auditing
from tpbench.measure.audit import AuditedSession
from tpbench.measure.clock import Clock
from tpbench.measure.inputs import Inputs
from tpbench.measure.session import Context, Costs, Verdict

CHANGED = "with changed inputs, after a correct result with the first ones: not twice the inputs"
LATE = "a result changed after its iteration had ended: work was left on another stream or thread"
WRITTEN = "the variant wrote to its inputs"


class Doubling:
    """A session whose step returns twice its inputs (3, 5)."""

    costs = Costs(bytes_moved=1, bytes_communicated=0)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.audited_inputs = Inputs([torch.arange(1, 16).to(dtype).reshape(3, 5)])
        self.audited_inputs.remember()
        self.trusted = self.fresh = self.keeps_output = False
        self.audited = True
        self.output = self.doubled()
        self.events: list[str] = []

    def doubled(self) -> Tensor:
        return self.audited_inputs.tensors[0] * 2

    def outputs(self) -> Sequence[Tensor]:
        return [self.output]

    def step(self) -> None:
        self.events.append("step")
        self.output = self.doubled()

    def restore(self) -> None:
        self.events.append("restore")

    def release(self) -> None:
        pass

    def check(self) -> Verdict:
        self.events.append("check")
        right = torch.equal(self.output.nan_to_num(), self.doubled())
        return Verdict({}, None if right else "not twice the inputs")


class Late(Doubling):
    """A session whose result is complete only when it is checked."""

    def step(self) -> None:
        super().step()
        self.output[2, 4] = 0

    def check(self) -> Verdict:
        self.output[2, 4] = self.doubled()[2, 4]
        return super().check()


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    return cpu_context(lone_rank(monkeypatch))


@pytest.fixture(autouse=True)
def negated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change negates the first row: random signs could all be positive."""
    monkeypatch.setattr(Inputs, "draw", lambda self: {0: torch.tensor([-1, 1, 1])})


class StandInClock(Clock):
    """A clock that returns the given times."""

    def __init__(self, milliseconds: list[float]) -> None:
        self.milliseconds, self.fresh = milliseconds, False

    def interleaved(self, timed: Any, iterations: int) -> list[list[float]]:
        assert iterations == len(self.milliseconds)
        self.fresh = timed[0][1].__self__.fresh
        return [self.milliseconds]


def test_a_session_says_whether_it_is_audited() -> None:
    session: Any = Doubling()
    assert auditing.is_audited(session)
    session.audited = False
    assert not auditing.is_audited(session)
    plain: Any = object()
    assert not auditing.is_audited(plain)


def test_poison_fills_outputs_with_nan() -> None:
    session: Any = Doubling()
    number, expanded, counts = torch.ones(2), torch.ones(1).expand(4), torch.ones(3, dtype=torch.int64)
    session.outputs = lambda: [number, expanded, counts]
    auditing.poison(session)
    assert number.isnan().all()
    assert torch.equal(expanded, torch.ones(4)) and torch.equal(counts, torch.ones(3, dtype=torch.int64))


def test_outputs_are_poisoned_before_the_last_iteration() -> None:
    session: Any = Doubling()
    restore = auditing.restore_before(session, 3)
    poisoned = []
    for _ in range(3):
        restore()
        poisoned.append(bool(session.output.isnan().all()))
        session.step()
    assert poisoned == [False, False, True] and session.events == ["restore", "step"] * 3
    session.audited = False
    assert auditing.restore_before(session, 3) == session.restore


def test_outputs_of_a_subclass_of_tensors_are_named() -> None:
    session: Any = Doubling()
    assert auditing.lazy_output_reason(session) is None
    session.outputs = lambda: [torch.ones(1), torch.nn.Parameter(torch.ones(1))]
    assert auditing.lazy_output_reason(session) == "the step returned a Parameter in place of a torch.Tensor"
    session.trusted = True
    assert auditing.lazy_output_reason(session) is None
    plain: Any = object()
    assert auditing.lazy_output_reason(plain) is None


def test_the_last_timed_result_is_checked() -> None:
    session: Any = Doubling()
    assert auditing.timed_result_reason(session, "wall") is None
    session.output.zero_()
    assert auditing.timed_result_reason(session, "device") == (
        "the last iteration of the device clock, after a correct first one: not twice the inputs"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_session_that_computes_passes_with_changed_inputs(context: Context, dtype: torch.dtype) -> None:
    session = Doubling(dtype)
    before = session.output.clone()
    assert auditing.changed_inputs_reason(session, session.step, context) is None
    assert session.events == ["restore", "step", "check"]
    assert torch.equal(session.output[0], -before[0]) and torch.equal(session.output[1:], before[1:])


def test_a_stored_answer_is_wrong_with_changed_inputs(context: Context) -> None:
    session = Doubling()
    answer = session.output.clone()

    def stored() -> None:
        session.output = answer

    assert auditing.changed_inputs_reason(session, stored, context) == CHANGED


def test_a_step_that_computes_nothing_leaves_nan(context: Context) -> None:
    session = Doubling()
    assert auditing.changed_inputs_reason(session, lambda: None, context) == CHANGED
    assert session.output.isnan().all()


def test_a_result_that_changes_after_its_iteration_is_late(context: Context) -> None:
    session = Late()
    assert auditing.changed_inputs_reason(session, session.step, context) == LATE
    assert session.check().wrong is None


def test_nan_that_stays_is_not_late(context: Context) -> None:
    session = Doubling()

    def step() -> None:
        session.step()
        session.output[1, 1] = float("nan")

    assert auditing.changed_inputs_reason(session, step, context) == CHANGED


def test_a_gpu_sleeps_before_the_inputs_change(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    """A kernel that does not wait for the current stream reads the old inputs then."""
    session = Doubling()
    events = session.events
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: events.append("sleep"))
    monkeypatch.setattr(dist, "barrier", lambda: events.append("barrier"))
    change = session.audited_inputs.change
    monkeypatch.setattr(session.audited_inputs, "change", lambda drawn: (events.append("change"), change(drawn)))
    on_gpu = dataclasses.replace(context, device=torch.device("cuda"))
    assert auditing.changed_inputs_reason(session, session.step, on_gpu) is None
    assert events == ["synchronize", "barrier", "sleep", "change", "restore", "step", "synchronize", "check"]


@pytest.mark.parametrize(
    ("changed_ms", "usual_ms", "complaint"),
    [
        # The slower rank takes twice these times on changed inputs. The 95th percentile counts of the timed ones.
        ([2.0] * 5, [2.0] * 40, None),
        ([3.01] * 5, [3.0] * 40, "an iteration takes 6.02 ms if its inputs have changed, and 3 ms if not"),
        ([2.01] * 5, [2.0] * 40, "an iteration takes 4.02 ms if its inputs have changed, and 2 ms if not"),
        ([2.01] * 4 + [1.99], [2.0] * 40, None),
        ([9.0] * 5, [2.0] * 39 + [90.0], "an iteration takes 18 ms if its inputs have changed, and 2 ms if not"),
        ([9.0] * 5, [2.0] * 36 + [90.0] * 4, None),
    ],
)
def test_iterations_on_changed_inputs_are_compared_with_the_timed_ones(
    context: Context, changed_ms: list[float], usual_ms: list[float], complaint: str | None
) -> None:
    session, clock = Doubling(), StandInClock(changed_ms)
    usual = [np.array([1.0, each]) for each in usual_ms]
    found = auditing.changed_iterations_reason(session, session.step, clock, usual, context)
    assert found == (f"{complaint}: it returns stored answers" if complaint else None)
    assert clock.fresh is True and session.fresh is False


def test_written_inputs_are_found_after_all_changes_are_undone(context: Context) -> None:
    session = Doubling()
    session.fresh = True
    session.audited_inputs.change()
    assert auditing.written_inputs_reason(session, context) is None
    assert session.fresh is False and session.events == ["restore"]
    session.audited_inputs.tensors[0][1, 2] += 1
    assert auditing.written_inputs_reason(session, context) == WRITTEN


@pytest.mark.parametrize(("flags", "found"), [([0.0, 0.0], False), ([0.0, 1.0], True), ([1.0, 1.0], True)])
def test_a_flag_of_any_rank_counts(context: Context, flags: list[float], found: bool) -> None:
    with mock.patch.object(auditing, "gather_number", lambda value, _: flags):
        assert auditing.on_any_rank(False, context) is found


def audited(
    context: Context, session: AuditedSession, step: Callable[[], None], another: bool = True, slow_ms: float = 0.0
) -> str | None:
    """Audit a session, with a device clock of 1 ms if `slow_ms` is the time on changed inputs."""
    device_clock = (StandInClock([slow_ms / 2] * 5), [np.ones(2)] * 5) if slow_ms else None
    return auditing.audit(session, step, context, another, device_clock)


def test_the_first_reason_counts(context: Context) -> None:
    honest = Doubling()
    assert audited(context, honest, honest.step) is None
    assert honest.events == ["restore", "step", "check", "restore"]
    assert audited(context, honest, honest.step, slow_ms=1.0) is None
    assert "stored answers" in (audited(context, honest, honest.step, slow_ms=9.0) or "")
    lazy, written = Doubling(), Doubling()
    assert audited(context, lazy, lambda: None, slow_ms=9.0) == CHANGED
    assert audited(context, lazy, lambda: None, another=False) is None
    written.audited_inputs.tensors[0][0, 0] = 7
    assert audited(context, written, written.step) == WRITTEN
    assert audited(context, written, written.step, another=False) == WRITTEN


def test_a_reason_refuses_a_verdict() -> None:
    verdict = Verdict({"loss_value": 1.0}, None)
    assert auditing.refused(verdict, None) is verdict
    assert auditing.refused(verdict, "late") == Verdict({"loss_value": 1.0}, "late")
