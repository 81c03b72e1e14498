"""How a cell is measured, with sessions whose times and faults are known."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Rank, run_on_ranks
from tpbench.measure import run as running
from tpbench.measure.session import Context, Costs, Schedule, Verdict
from tpbench.measure.settings import MeasureSettings


class Sleeper:
    """Sleeps longer on later ranks."""

    costs = Costs(bytes_moved=10**6, bytes_communicated=0)

    def __init__(self, seconds: float, wrong: str | None = None) -> None:
        self.seconds, self.wrong = seconds, wrong
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        time.sleep(self.seconds * (1 + dist.get_rank()))

    def release(self) -> None:
        pass

    def restore(self) -> None:
        pass

    def check(self) -> Verdict:
        return Verdict({"loss_value": 1.0}, self.wrong)


def measured(
    here: Rank, seconds: float, settings: MeasureSettings, wrong: str | None = None, interpreted: bool = False
) -> tuple[dict[str, Any], int]:
    context = Context(
        here.rank, here.world_size, here.rank, here.world_size, 0, 1, here.group, here.group, torch.device("cpu")
    )
    session = Sleeper(seconds, wrong)
    _, columns = running.run(session, context, settings, 2.0, lambda what: None, interpreted)
    return columns, session.steps


def test_the_slowest_rank_is_the_time_and_all_ranks_agree() -> None:
    settings = MeasureSettings(time_budget_s=1.0, min_iterations=5, max_iterations=40, precision=0.001)
    results = run_on_ranks(2, measured, 0.005, settings)
    columns = results[0][0]
    assert 10 <= columns["time_ms"] == pytest.approx(np.median(columns["samples_ms"]))
    assert 4 < columns["skew_ms"] < columns["time_ms"]  # rank 0 sleeps half as long
    assert columns["iterations"] == len(columns["samples_ms"])
    assert columns["floor_ms"] == pytest.approx(0.5)
    assert columns["fraction_of_floor"] == pytest.approx(0.5 / columns["time_ms"])
    assert columns["warmed_up"] is True
    assert results[0][1] == results[1][1]


def test_iterations_end_when_the_median_is_known_or_at_the_limit() -> None:
    known = MeasureSettings(time_budget_s=5.0, min_iterations=8, max_iterations=500, precision=0.5)
    assert 8 <= run_on_ranks(2, measured, 0.002, known)[0][0]["iterations"] <= 20
    limited = MeasureSettings(time_budget_s=5.0, min_iterations=8, max_iterations=10, precision=0.0)
    assert run_on_ranks(2, measured, 0.002, limited)[0][0]["iterations"] == 10


@pytest.mark.parametrize("interpreted", [True, False])
def test_a_budget_shorter_than_a_pass(interpreted: bool) -> None:
    settings = MeasureSettings(time_budget_s=0.1)
    columns, steps = run_on_ranks(2, measured, 0.2, settings, None, interpreted)[0]
    assert (steps, columns["warmed_up"]) == ((1, False) if interpreted else (2, True))
    assert columns["iterations"] == 1
    assert columns["time_ms"] >= 400


def test_what_is_wrong_has_no_time() -> None:
    columns, _ = run_on_ranks(2, measured, 0.001, MeasureSettings(time_budget_s=0.1), "not right")[0]
    assert "time_ms" not in columns
    assert columns["peak_gib"] >= 0


class Captured(Sleeper):
    """What a graph's replay fills is the output that is checked."""

    output: str | None = None

    def step(self) -> None:
        super().step()
        self.output = "eager"

    def release(self) -> None:
        self.output = None

    def check(self) -> Verdict:
        return Verdict({}, None if self.output == "replayed" else f"checked {self.output}")


def captured(here: Rank) -> tuple[str | None, dict[str, Any]]:
    session = Captured(0.0005)

    def capture(*_: object) -> Any:
        session.release()
        session.output = "captured, not run"

        def replay() -> None:
            session.output = "replayed"
            time.sleep(0.001)

        return replay

    whole, running._captured = running._captured, capture
    try:
        context = Context(
            here.rank, here.world_size, here.rank, here.world_size, 0, 1, here.group, here.group, torch.device("cpu")
        )
        settings = MeasureSettings(time_budget_s=0.2, graph=True)
        verdict, columns = running.run(session, context, settings, 2.0, lambda what: None)
    finally:
        running._captured = whole
    return verdict.wrong, columns


def test_with_a_graph_its_replay_is_checked_and_timed() -> None:
    wrong, columns = run_on_ranks(2, captured)[0]
    assert wrong is None
    assert columns["graph"] is True
    assert columns["time_ms"] >= 1.0


def test_next_block_never_passes_the_limit() -> None:
    settings = MeasureSettings(time_budget_s=1.0, min_iterations=20, max_iterations=30, precision=0.0)
    taken = [np.array([1.0, 2.0]), np.array([1.0, 3.0])] * 14
    assert running._next_block(taken, 0.1, settings) == 2
    assert running._next_block(taken + taken, 0.1, settings) == 0
    assert running._next_block(taken, 1.5, settings) == 0


class Training(Sleeper):
    """Trains 2 + 3 steps, the later the longer, and knows what it was called for."""

    schedule = Schedule(warmup_iterations=2, iterations=3, held_before=0)

    def __init__(self, wrong: str | None = None) -> None:
        super().__init__(0.0, wrong)
        self.calls: list[str] = []
        self.slept_ms: list[float] = []

    def step(self) -> None:
        self.calls.append("step")
        self.steps += 1
        began = time.perf_counter()
        time.sleep(0.03 * self.steps * (1 + dist.get_rank()))
        self.slept_ms.append((time.perf_counter() - began) * 1e3)

    def restore(self) -> None:
        self.calls.append("restore")

    def check(self) -> Verdict:
        self.calls.append("check")
        return super().check()


def trained(here: Rank, wrong: str | None) -> tuple[dict[str, Any], list[str], list[float]]:
    context = Context(here.rank, here.world_size, here.rank, here.world_size, 0, 1, here.group, here.group,
                      torch.device("cpu"))  # fmt: skip
    session = Training(wrong)
    settings = MeasureSettings(time_budget_s=0.001, min_iterations=50, max_iterations=100)  # none of it is asked
    _, columns = running.run(session, context, settings, 2.0, lambda what: None)
    return columns, session.calls, session.slept_ms


def test_a_schedule_is_run_once_and_each_step_timed_once() -> None:
    ranks = run_on_ranks(2, trained, None)
    slowest = np.max([slept_ms[2:] for _, _, slept_ms in ranks], axis=0)  # steps 3, 4 and 5
    for columns, calls, _ in ranks:
        assert calls == ["restore", "step"] * 5 + ["check"]
        assert columns["iterations"] == len(columns["samples_ms"]) == 3
        assert columns["warmed_up"] is True
        # Each of them as long as on the slower rank, in order: one step differs from the next by 60 ms.
        assert columns["samples_ms"] == pytest.approx(slowest, rel=0, abs=50)
        assert columns["peak_gib"] > 0.01  # above nothing: all that the process holds


def test_a_schedule_that_went_wrong_has_no_time() -> None:
    for columns, calls, _ in run_on_ranks(2, trained, "not right"):
        assert calls[-1] == "check"
        assert "time_ms" not in columns and columns["peak_gib"] > 0


class Detailing(Sleeper):
    """Has a floor on the wire, and more to say once its time is known."""

    costs = Costs(bytes_moved=10**6, bytes_communicated=0, wire_ms=2.0)

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {"twice_ms": 2 * columns["time_ms"]}


def detailed(here: Rank, wrong: str | None) -> dict[str, Any]:
    context = Context(here.rank, here.world_size, here.rank, here.world_size, 0, 1, here.group, here.group,
                      torch.device("cpu"))  # fmt: skip
    settings = MeasureSettings(time_budget_s=0.1, min_iterations=2, max_iterations=4)
    return running.run(Detailing(0.001, wrong), context, settings, 2.0, lambda what: None)[1]


def test_details_come_last_and_only_of_what_is_right() -> None:
    columns = run_on_ranks(2, detailed, None)[0]
    assert columns["twice_ms"] == 2 * columns["time_ms"]
    assert columns["floor_ms"] == pytest.approx(0.5 + 2.0)
    assert "twice_ms" not in run_on_ranks(2, detailed, "off")[0]
