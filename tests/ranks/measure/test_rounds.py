"""Rounds of an interleaved cell: all ranks run the same ones, within the limits of time and iterations."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import Rank, run_on_ranks
from tests.support.simulated_time import simulated_time
from tests.support.sleeping_sessions import Sleeper, answered, cpu_context
from tpbench.measure import run as running
from tpbench.measure.session import MeasureSettings
from tpbench.measure.stop_rules import RoundRequest


def measured(here: Rank, settings: MeasureSettings, rounds: int) -> tuple[dict[str, Any], int, list[RoundRequest]]:
    with simulated_time() as time:
        session = Sleeper(here, time, 0.001)
        steps = running.measurement(lambda: session, cpu_context(here), settings, 2.0, interleaved=True)
        requests, (_, columns) = answered(steps, rounds)
    return columns, session.steps, requests


def test_rounds_of_all_ranks_until_the_median_is_precise() -> None:
    settings = MeasureSettings(time_budget_s=5.0, min_iterations=8, max_iterations=500, precision=0.5)
    (columns, steps, requests), (_, other_steps, other_requests) = run_on_ranks(2, measured, settings, 15)
    assert steps == other_steps and other_requests == requests  # rank 0 requests for all
    assert requests == [RoundRequest.MORE] * 12 + [RoundRequest.ENOUGH] * 4
    assert len(columns["round_ms"]) == 15 and "device_round_ms" not in columns
    assert len(columns["samples_ms"]) == columns["iterations"] >= 15
    assert (
        min(columns["samples_ms"]) <= min(columns["round_ms"]) <= max(columns["round_ms"]) <= max(columns["samples_ms"])
    )
    assert columns["time_ms"] == pytest.approx(2, rel=1e-4)  # the slowest rank's, whose steps take ever longer


@pytest.mark.parametrize(
    "settings",
    [
        MeasureSettings(time_budget_s=5.0, min_iterations=8, max_iterations=13, precision=0.0),
        MeasureSettings(time_budget_s=0.1, min_iterations=8, max_iterations=5000, precision=0.0),
    ],
)
def test_limits_are_kept(settings: MeasureSettings) -> None:
    columns, _, requests = run_on_ranks(2, measured, settings, 1000)[0]
    assert requests[-1] == RoundRequest.NO_MORE and set(requests[:-1]) == {RoundRequest.MORE}
    assert columns["iterations"] <= settings.max_iterations
    assert sum(columns["samples_ms"]) / 1e3 < 3 * settings.time_budget_s
