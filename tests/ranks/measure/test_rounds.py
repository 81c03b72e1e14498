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
