"""How a cell is measured, with sessions whose times and faults are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.ranks import Rank, run_on_ranks
from tests.support.simulated_time import SimulatedTime, simulated_time
from tests.support.sleeping_sessions import Sleeper, cpu_context
from tpbench.measure import run as running
from tpbench.measure.clock import ColdCache, WallClock
from tpbench.measure.measured_columns import launch_samples, time_columns
from tpbench.measure.session import Costs, IterationSchedule, Verdict
from tpbench.measure.settings import MeasureSettings

COPY_GB_PER_S = 2.0


def run(
    here: Rank, session: Any, settings: MeasureSettings, interpreted: bool = False
) -> tuple[Verdict, dict[str, Any]]:
    return running.run(session, cpu_context(here), settings, COPY_GB_PER_S, lambda message: None, interpreted)


def measured(
    here: Rank, seconds: float, settings: MeasureSettings, wrong: str | None = None, interpreted: bool = False
) -> tuple[dict[str, Any], int]:
    """The columns and the number of steps."""
    with simulated_time() as time:
        session = Sleeper(here, time, seconds, wrong)
        _, columns = run(here, session, settings, interpreted)
    return columns, session.steps


def test_the_slowest_rank_is_the_time_and_all_ranks_agree() -> None:
    settings = MeasureSettings(time_budget_s=1.0, min_iterations=5, max_iterations=40, precision=0.001)
    results = run_on_ranks(2, measured, 0.005, settings)
    columns = results[0][0]
    assert columns["time_ms"] == pytest.approx(10) == pytest.approx(np.median(columns["samples_ms"]))
    assert columns["skew_ms"] == pytest.approx(5)  # rank 0 sleeps half as long
    assert columns["iterations"] == len(columns["samples_ms"])
    assert columns["floor_ms"] == pytest.approx(0.5)
    assert columns["fraction_of_floor"] == pytest.approx(0.5 / columns["time_ms"])
    assert columns["warmed_up"] is True
    assert results[0][1] == results[1][1]
    assert not {"bound", "energy_j", "launch_ms", "throttle_reasons"} & set(columns)  # known of GPUs only


def kept_host(here: Rank) -> list[list[float]]:
    """The time that a step keeps the host of each rank, for two iterations. The context is of a GPU."""
    with simulated_time() as time:
        wall = WallClock(here.device, ColdCache(here.device, here.world_size))
        session = Sleeper(here, time, 0.001)
        wall.warm_up(session.step, session.restore, 1)
        wall.samples(session.step, session.restore, 2)
    context = dataclasses.replace(cpu_context(here), device=torch.device("cuda"))
    launches = launch_samples(wall, 2, context) or []
    columns = time_columns(session, context, launches, None, launches, {"floor_ms": 1.0, "bytes_moved": 1}, print)
    return [[float(ms) for ms in each] for each in launches] + [[columns["launch_ms"]]]


def test_the_rank_whose_host_is_kept_longest_decides() -> None:
    for launches in run_on_ranks(2, kept_host):
        assert launches == [pytest.approx([1.0, 2.0])] * 2 + [pytest.approx([2.0])]


def test_iterations_end_when_the_median_is_precise_or_at_the_limit() -> None:
    precise = MeasureSettings(time_budget_s=5.0, min_iterations=8, max_iterations=500, precision=0.5)
    assert 8 <= run_on_ranks(2, measured, 0.002, precise)[0][0]["iterations"] <= 20
    limited = MeasureSettings(time_budget_s=5.0, min_iterations=8, max_iterations=10, precision=0.0)
    assert run_on_ranks(2, measured, 0.002, limited)[0][0]["iterations"] == 10


@pytest.mark.parametrize("interpreted", [True, False])
def test_a_time_budget_shorter_than_one_pass(interpreted: bool) -> None:
    settings = MeasureSettings(time_budget_s=0.1)
    columns, steps = run_on_ranks(2, measured, 0.2, settings, None, interpreted)[0]
    assert (steps, columns["warmed_up"]) == ((1, False) if interpreted else (2, True))
    assert columns["iterations"] == 1
    assert columns["time_ms"] == pytest.approx(400)


def test_a_wrong_result_has_no_time() -> None:
    columns, _ = run_on_ranks(2, measured, 0.001, MeasureSettings(time_budget_s=0.1), "not right")[0]
    assert "time_ms" not in columns
    assert columns["peak_gib"] >= 0


class Captured(Sleeper):
    """A session that is right only if the output of a graph's replay is checked."""

    output: str | None = None

    def step(self) -> None:
        super().step()
        self.output = "eager"

    def release(self) -> None:
        self.output = None

    def check(self) -> Verdict:
        return Verdict({}, None if self.output == "replayed" else f"checked {self.output}")


def captured(here: Rank) -> tuple[str | None, dict[str, Any]]:
    with simulated_time() as time:
        session = Captured(here, time, 0.0005)

        def capture(*_: object) -> Any:
            session.release()
            session.output = "captured, not run"

            def replay() -> None:
                session.output = "replayed"
                time.sleep(0.001)

            return replay

        with mock.patch.object(running, "_captured", capture):
            verdict, columns = run(here, session, MeasureSettings(time_budget_s=0.2, graph=True))
    return verdict.wrong, columns


def test_with_a_graph_its_replay_is_checked_and_timed() -> None:
    wrong, columns = run_on_ranks(2, captured)[0]
    assert wrong is None
    assert columns["graph"] is True
    assert columns["time_ms"] == pytest.approx(1.0)


class Training(Sleeper):
    """A session that trains 2 + 3 steps, each longer than the one before, and notes its calls."""

    schedule = IterationSchedule(warmup_iterations=2, iterations=3, held_before=0)

    def __init__(self, here: Rank, time: SimulatedTime, wrong: str | None = None) -> None:
        super().__init__(here, time, 0.0, wrong)
        self.rank = here.rank
        self.calls: list[str] = []

    def step(self) -> None:
        self.calls.append("step")
        self.steps += 1
        self.time.sleep(0.03 * self.steps * (1 + self.rank))

    def restore(self) -> None:
        self.calls.append("restore")

    def check(self) -> Verdict:
        self.calls.append("check")
        return super().check()


def trained(here: Rank, wrong: str | None) -> tuple[dict[str, Any], list[str]]:
    settings = MeasureSettings(time_budget_s=0.001, min_iterations=50, max_iterations=100)  # none of it applies
    with simulated_time() as time:
        session = Training(here, time, wrong)
        _, columns = run(here, session, settings)
    return columns, session.calls


def test_a_schedule_is_run_once_and_each_step_timed_once() -> None:
    for columns, calls in run_on_ranks(2, trained, None):
        assert calls == ["restore", "step"] * 5 + ["check"]
        assert columns["iterations"] == len(columns["samples_ms"]) == 3
        assert columns["warmed_up"] is True
        # Steps 3, 4 and 5 in order, each as long as on the slower rank.
        assert columns["samples_ms"] == pytest.approx([180, 240, 300])
        assert columns["peak_gib"] > 0.01  # above 0 bytes: all that the process holds


def test_a_schedule_with_a_wrong_result_has_no_time() -> None:
    for columns, calls in run_on_ranks(2, trained, "not right"):
        assert calls[-1] == "check"
        assert "time_ms" not in columns and columns["peak_gib"] > 0


class Detailing(Sleeper):
    """A session with communication in its floor, and with details."""

    costs = Costs(bytes_moved=10**6, bytes_communicated=0, wire_ms=2.0)

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {"twice_ms": 2 * columns["time_ms"]}


def detailed(here: Rank, wrong: str | None) -> dict[str, Any]:
    settings = MeasureSettings(time_budget_s=0.1, min_iterations=2, max_iterations=4)
    with simulated_time() as time:
        return run(here, Detailing(here, time, 0.001, wrong), settings)[1]


def test_details_come_last_and_only_of_a_right_result() -> None:
    columns = run_on_ranks(2, detailed, None)[0]
    assert columns["twice_ms"] == 2 * columns["time_ms"]
    assert columns["floor_ms"] == pytest.approx(0.5 + 2.0)
    assert "twice_ms" not in run_on_ranks(2, detailed, "off")[0]
