"""The audit of a schedule: further iterations on changed inputs, and the comparison of both clocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.lone_rank import lone_rank
from tests.support.sleeping_sessions import cpu_context
from tpbench.measure.schedule_audit import AuditedSchedule, audit_schedule
from tpbench.measure.session import Costs, IterationSchedule, Verdict

TIMED = [np.array([1.0, 1.2])] * 4
SLOW = "it returns stored answers"


class Steps:
    """A session that notes what it is asked for."""

    costs = Costs(bytes_moved=1, bytes_communicated=0)
    schedule = IterationSchedule(2, 4, 0)
    audited, changed_iterations, fresh = True, 3, False

    def __init__(self, wrong: str | None = None) -> None:
        self.wrong, self.calls = wrong, list[str]()

    def step(self) -> None:
        self.calls.append(f"step fresh={self.fresh}")

    def restore(self) -> None:
        self.calls.append(f"restore fresh={self.fresh}")

    def release(self) -> None: ...

    def check(self) -> Verdict:
        raise AssertionError("the schedule was checked before")

    def check_changed(self) -> str | None:
        self.calls.append(f"check fresh={self.fresh}")
        return self.wrong


class Wall:
    """A clock whose iterations take so many ms on rank 0, and twice that on rank 1."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def samples(self, step: Callable[[], None], restore: Callable[[], None], iterations: int) -> list[float]:
        for _ in range(iterations):
            restore()
            step()
        return [self.ms] * iterations


def audited(monkeypatch: pytest.MonkeyPatch, session: Steps, ms: float = 0.6, on_device: Any = None) -> str | None:
    wall: Any = Wall(ms)
    assert isinstance(session, AuditedSchedule)
    return audit_schedule(session, wall, TIMED, on_device, cpu_context(lone_rank(monkeypatch)))


def test_further_iterations_run_on_changed_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Steps()
    assert audited(monkeypatch, session) is None
    assert session.calls == ["restore fresh=True", "step fresh=True"] * 3 + ["check fresh=False"]
    assert audited(monkeypatch, Steps("not right"), ms=5.0, on_device=TIMED) == "not right"


def test_slow_iterations_on_changed_inputs_are_wrong_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert audited(monkeypatch, Steps(), ms=5.0) is None
    assert (audited(monkeypatch, Steps(), ms=5.0, on_device=TIMED) or "").endswith(SLOW)
    assert audited(monkeypatch, Steps(), ms=1.0, on_device=TIMED) is None


def test_the_clocks_are_compared_first(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Steps("not right")
    on_device = [np.array([0.1, 0.1])] * 4
    monkeypatch.setattr("tpbench.measure.clock_comparison.LATER_MS", 0.5)
    found = audited(monkeypatch, session, on_device=on_device)
    assert found is not None and found.startswith("the device works for 1.1 ms after the end event")
    assert session.calls == []


def test_nothing_runs_if_nothing_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Steps("not right")
    session.changed_iterations = 0
    assert audited(monkeypatch, session, on_device=TIMED) is None and session.calls == []
