"""A session with a fixed number of iterations, on one process and on a GPU that is a stand-in."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.support.lone_rank import lone_rank
from tests.support.ranks import Rank
from tests.support.simulated_time import SimulatedTime, simulated_time
from tests.support.sleeping_sessions import Sleeper, cpu_context
from tests.unit.measure.test_clock import CPU, FakeEvents, LoggedCache
from tests.unit.measure.test_memory import FakeMemory
from tpbench.measure import run as running
from tpbench.measure import scheduled
from tpbench.measure.clock import WallClock
from tpbench.measure.session import IterationSchedule
from tpbench.measure.settings import MeasureSettings
from tpbench.measure.stopwatch import Stopwatch

GIB = 2**30


class Training(Sleeper):
    """A session that trains 2 + 3 steps. Step n takes n ms, and notes its call."""

    schedule = IterationSchedule(warmup_iterations=2, iterations=3, held_before=GIB)

    def __init__(self, here: Rank, time: SimulatedTime, wrong: str | None = None) -> None:
        super().__init__(here, time, 0.0, wrong)
        self.calls: list[str] = []

    def step(self) -> None:
        self.steps += 1
        self.calls.append("step")
        self.time.sleep(0.001 * self.steps)

    def restore(self) -> None:
        self.calls.append("restore")

    def check(self) -> Any:
        self.calls.append("check")
        return super().check()


def trained(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, wrong: str | None = None
) -> tuple[dict[str, Any], Training, list[str]]:
    here, said = lone_rank(monkeypatch), list[str]()
    context = dataclasses.replace(cpu_context(here), device=torch.device("cuda" if cuda else "cpu"))
    cache: Any = LoggedCache([])
    with simulated_time() as time:
        gpu = FakeMemory()
        gpu.patch(monkeypatch)
        gpu.held, gpu.peak = 3 * GIB, 5 * GIB
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvents(time, []))
        monkeypatch.setattr(scheduled, "this_gpu", lambda device: None)
        monkeypatch.setattr(scheduled, "iteration_columns", lambda *_: {"bound": "memory"})
        session = Training(here, time, wrong)
        wall = WallClock(CPU, cache)
        _, columns = scheduled.run_scheduled(session, session.schedule, context, wall, 2.0, said.append)
    return columns, session, said


@pytest.mark.parametrize("cuda", [True, False])
def test_each_step_runs_once_and_the_last_three_are_timed(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, session, said = trained(monkeypatch, cuda)
    assert session.calls == ["restore", "step"] * 5 + ["check"]
    # The second rank is twice as slow as the first, and its times count.
    assert columns["samples_ms"] == pytest.approx([6.0, 8.0, 10.0])
    assert (columns["warmed_up"], columns["graph"], columns["iterations"]) == (True, False, 3)
    assert (
        columns["floor_ms"] == 0.5 and columns["bound"] == "memory" and said[:3] == ["warming up", "timing", "checking"]
    )
    assert ("device_ms" in columns) == ("launch_ms" in columns) == cuda
    if cuda:
        assert columns["launch_ms"] == pytest.approx(8.0)  # the stand-in of a step only keeps the host
        assert columns["device_samples_ms"] == pytest.approx([6.0, 8.0, 10.0])
        assert columns["iteration_held_gib"] == [4.0] * 3 and columns["iteration_peak_gib"] == [8.0] * 3
        assert columns["rank_peak_gib"] == [4.0, 8.0] and columns["peak_gib"] == 8.0


def test_a_wrong_training_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, _, said = trained(monkeypatch, True, "not right")
    assert "samples_ms" not in columns and columns["peak_gib"] == 8.0 and said[-1] == "checking"


def test_a_measurement_is_not_interpreted_unless_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    here = lone_rank(monkeypatch)
    with simulated_time() as time:
        session = Sleeper(here, time, 1.0)
        settings = MeasureSettings(time_budget_s=0.1)
        _, columns = running.run(session, cpu_context(here), settings, 2.0, lambda _: None)
    assert columns["warmed_up"] and session.steps == 2


def test_a_stopwatch_asks_for_host_time_only_if_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def clock(self: Stopwatch, on_host: bool) -> Any:
        asked.append(on_host)
        cache: Any = LoggedCache([])
        return WallClock(CPU, cache)

    monkeypatch.setattr(Stopwatch, "_clock", clock)
    watch = Stopwatch(cpu_context(lone_rank(monkeypatch)))
    watch.ms(lambda: None)
    watch.interleaved_ms((lambda: None, lambda: None), iterations=1)
    watch.ms(lambda: None, on_host=True)
    assert asked == [False, False, True]
