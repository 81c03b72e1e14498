"""A measurement from the first pass to its columns: on one process, whose second rank is twice as slow."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.support.lone_rank import lone_rank
from tests.support.ranks import Rank
from tests.support.simulated_time import SimulatedTime, simulated_time
from tests.support.sleeping_sessions import Sleeper, cpu_context
from tpbench.measure import clock
from tpbench.measure import run as running
from tpbench.measure.settings import MeasureSettings


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(clock, "CPU_FLUSH_BYTES", 2)
    return lone_rank(monkeypatch)


class Exact(Sleeper):
    """A session whose steps all take the same time."""

    def step(self) -> None:
        self.steps += 1
        self.time.sleep(self.seconds)


def measured(
    here: Rank, seconds: float, kind: type[Sleeper] = Sleeper, wrong: str | None = None, interpreted: bool = False,
    graph: bool = False, **settings: Any,
) -> tuple[dict[str, Any], int, list[str]]:  # fmt: skip
    """Return the columns, the number of steps and the phases that were announced."""
    said: list[str] = []
    with simulated_time() as time:
        session = kind(here, time, seconds, wrong)
        wanted = MeasureSettings(graph=graph, **settings)
        _, columns = running.run(session, cpu_context(here), wanted, 2.0, said.append, interpreted)
    return columns, session.steps, said


def test_blocks_grow_until_the_median_is_precise(here: Rank) -> None:
    columns, steps, said = measured(here, 0.002, time_budget_s=5.0, min_iterations=8, max_iterations=500, precision=0.5)
    assert (columns["iterations"], steps) == (10, 1 + 1 + 3 + 10)  # two blocks of 5
    assert said == ["first pass", "second pass", "checking", "timing"]
    assert (columns["warmed_up"], columns["graph"]) == (True, False)
    assert columns["time_ms"] == pytest.approx(4.0) and columns["skew_ms"] == pytest.approx(2.0)
    assert columns["floor_ms"] == pytest.approx(0.5) and columns["gb_per_s"] == pytest.approx(0.25)
    assert columns["fraction_of_floor"] == pytest.approx(0.125)
    assert columns["rank_peak_gib"] == [columns["peak_gib"] / 2, columns["peak_gib"]]


@pytest.mark.parametrize(("budget_s", "iterations"), [(1.0, 40), (0.052, 11), (0.02, 5)])
def test_blocks_end_at_the_limit_of_iterations_or_of_time(here: Rank, budget_s: float, iterations: int) -> None:
    columns, steps, _ = measured(
        here, 0.005, time_budget_s=budget_s, min_iterations=2, max_iterations=40, precision=0.0
    )
    assert (columns["iterations"], steps) == (iterations, 5 + iterations)


@pytest.mark.parametrize("interpreted", [True, False])
def test_a_pass_as_long_as_the_budget_is_repeated(here: Rank, interpreted: bool) -> None:
    """A pass takes 0.25 s, and 0.5 s on the slowest rank."""
    columns, steps, _ = measured(here, 0.25, Exact, interpreted=interpreted, time_budget_s=0.5, max_iterations=1)
    assert (columns["warmed_up"], columns["iterations"], steps) == (True, 1, 2 + 3 + 1)


@pytest.mark.parametrize("interpreted", [True, False])
def test_a_pass_longer_than_the_budget_is_the_measurement(here: Rank, interpreted: bool) -> None:
    columns, steps, said = measured(here, 0.2, interpreted=interpreted, time_budget_s=0.3)
    assert (columns["iterations"], steps, columns["warmed_up"]) == (1, 1 if interpreted else 2, not interpreted)
    assert columns["time_ms"] == pytest.approx(400)
    assert said == ["first pass", *([] if interpreted else ["second pass"]), "checking", "timing"]


def test_a_wrong_result_has_costs_and_memory_but_no_time(here: Rank) -> None:
    columns, steps, said = measured(here, 0.001, wrong="not right")
    assert "time_ms" not in columns and steps == 2 and said[-1] == "checking"
    assert columns["bytes_moved"] == 10**6 and columns["peak_gib"] >= 0


class Remembering(Sleeper):
    """A session that notes whether its result was freed before a pass, and which step made the result."""

    def __init__(self, here: Rank, time: SimulatedTime, seconds: float, wrong: str | None = None) -> None:
        super().__init__(here, time, seconds, wrong)
        self.events: list[str] = []

    def step(self) -> None:
        super().step()
        self.events.append("step")

    def release(self) -> None:
        self.events.append("release")

    def restore(self) -> None:
        self.events.append("restore")


def test_a_result_is_freed_before_the_checked_pass_and_a_graph_is_timed(here: Rank) -> None:
    events: list[str] = []

    def captured(session: Any) -> Any:
        session.events.append("capture")
        events.extend(session.events)

        def replay() -> None:
            events.append("replay")
            session.time.sleep(0.001)

        return replay

    with mock.patch.object(running, "_captured", captured):
        columns, steps, said = measured(here, 0.001, Remembering, graph=True, max_iterations=1)
    assert events == ["restore", "step", "release", "restore", "step", "capture"] + ["replay"] * (1 + 3 + 1)
    assert (columns["graph"], steps) == (True, 2)
    assert said == ["first pass", "second pass", "capturing a graph", "checking", "timing"]
