"""A measurement from the first pass to its columns: on one process, whose second rank is twice as slow."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.lone_rank import lone_rank
from tests.support.ranks import Rank
from tests.support.simulated_time import SimulatedTime, simulated_time
from tests.support.sleeping_sessions import Sleeper, cpu_context, run
from tpbench.measure import cuda_graph
from tpbench.measure import run as running
from tpbench.measure.session import IterationSchedule, MeasureSettings

LAST = ["preparing iterations back to back", "checking an iteration on changed inputs", "timing details"]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Rank:
    """Rank 0, whose cells have no iterations back to back: `test_chained` is about these."""
    monkeypatch.setattr(running, "chained_run", lambda *_: (None, {}))
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
    phases: list[str] = []
    with simulated_time() as time:
        session = kind(here, time, seconds, wrong)
        wanted = MeasureSettings(graph=graph, **settings)
        _, columns = run(session, dataclasses.replace(cpu_context(here), say=phases.append), wanted, interpreted)
    return columns, session.steps, phases


def test_blocks_grow_until_the_median_is_precise(here: Rank) -> None:
    columns, steps, phases = measured(
        here, 0.002, time_budget_s=5.0, min_iterations=8, max_iterations=500, precision=0.5
    )
    assert (columns["iterations"], steps) == (
        10,
        1 + 1 + 3 + 10 + 1,
    )  # two blocks of 5, and one iteration on changed inputs
    assert phases == ["first pass", "second pass", "checking", "timing", *LAST]
    assert (columns["warmed_up"], columns["graph"]) == (True, False)
    assert columns["time_ms"] == pytest.approx(4.0) and columns["skew_ms"] == pytest.approx(2.0)
    assert columns["floor_ms"] == pytest.approx(0.5) and columns["gb_per_s"] == pytest.approx(0.25)
    assert columns["fraction_of_floor"] == pytest.approx(0.125)
    assert columns["rank_peak_gib"] == [columns["peak_gib"] / 2, columns["peak_gib"]]
    assert not {"bound", "launch_ms", "throttle_reasons"} & set(columns)  # known of GPUs only


@pytest.mark.parametrize("interpreted", [True, False])
def test_only_a_pass_longer_than_the_budget_is_the_measurement(here: Rank, interpreted: bool) -> None:
    """A pass takes twice as long on the slowest rank."""
    columns, steps, phases = measured(here, 0.2, interpreted=interpreted, time_budget_s=0.3)
    assert (columns["iterations"], steps, columns["warmed_up"]) == (1, 1 if interpreted else 2, not interpreted)
    assert columns["time_ms"] == pytest.approx(400)
    assert phases == ["first pass", *([] if interpreted else ["second pass"]), "checking", "timing", "timing details"]
    columns, steps, _ = measured(here, 0.25, Exact, interpreted=interpreted, time_budget_s=0.5, max_iterations=1)
    assert (columns["warmed_up"], columns["iterations"], steps) == (True, 1, 2 + 3 + 1 + 1)  # as long as the budget


def test_a_profile_leaves_a_trace_of_one_more_iteration(here: Rank, tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        with simulated_time() as time:
            session = Sleeper(here, time, 0.001)
            context = dataclasses.replace(cpu_context(here), folder=folder)
            _, columns = run(session, context, MeasureSettings(max_iterations=1, profile=True))
        assert "time_ms" in columns and ("trace" in columns) == (folder == tmp_path)
    assert columns["trace"] == "trace_rank*.json.gz" and session.steps == 2 + 3 + 1 + 1 + 1
    trace = json.loads(gzip.decompress((tmp_path / "trace_rank0.json.gz").read_bytes()))
    assert trace["traceEvents"]


def test_a_wrong_result_has_costs_and_memory_but_no_time(here: Rank) -> None:
    columns, steps, phases = measured(here, 0.001, wrong="not right")
    assert "time_ms" not in columns and steps == 2 and phases[-1] == "checking"
    assert columns["bytes_moved"] == 10**6 and columns["peak_gib"] >= 0


class Logging(Sleeper):
    """A session that logs its calls."""

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

    def check(self) -> Any:
        self.events.append("check")
        return super().check()


def test_a_result_is_freed_before_the_checked_pass_and_the_replay_of_a_graph_is_checked_and_timed(here: Rank) -> None:
    events: list[str] = []

    def captured(session: Any) -> Any:
        session.events, events[:] = events, session.events
        events.append("capture")

        def replay() -> None:
            events.append("replay")
            session.time.sleep(0.001)

        return replay

    with mock.patch.object(cuda_graph, "captured_step", captured):
        columns, steps, phases = measured(here, 0.001, Logging, graph=True, max_iterations=1)
    passes = ["restore", "step", "release", "restore", "step", "capture"]
    last = ["check", "restore", "replay", "check"]
    assert events == [*passes, "restore", "replay", "check", *["restore", "replay"] * (3 + 1), *last]
    assert (columns["graph"], steps) == (True, 2)
    assert phases == ["first pass", "second pass", "capturing a graph", "first replay", "checking", "timing", *LAST]


class Training(Logging):
    """A session that trains 2 + 3 steps. Step n takes n ms."""

    schedule = IterationSchedule(warmup_iterations=2, iterations=3)

    def step(self) -> None:
        self.steps += 1
        self.events.append("step")
        self.time.sleep(0.001 * self.steps)


@pytest.mark.parametrize("wrong", [None, "not right"])
def test_each_step_of_a_schedule_runs_once_and_the_last_three_are_timed(here: Rank, wrong: str | None) -> None:
    phases: list[str] = []
    with simulated_time() as time:
        session = Training(here, time, 0.0, wrong)
        context = dataclasses.replace(cpu_context(here), say=phases.append)
        _, columns = run(session, context, MeasureSettings())
    assert session.events == ["restore", "step"] * 5 + ["check"]
    assert phases[:3] == ["warming up", "timing", "checking"]
    assert (columns["warmed_up"], columns["graph"], columns["floor_ms"]) == (True, False, 0.5)
    assert len(columns["iteration_peak_gib"]) == len(columns["iteration_held_gib"]) == 3
    # The second rank is twice as slow as the first, and its times count. A wrong training has none.
    assert columns.get("samples_ms") == (None if wrong else pytest.approx([6.0, 8.0, 10.0]))
    assert not {"bound", "device_ms", "launch_ms"} & set(columns)
