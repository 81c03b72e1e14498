"""How all ranks of a cell are measured together, with sessions whose times are known."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import Rank, run_on_ranks
from tests.support.simulated_time import simulated_time
from tests.support.sleeping_sessions import Sleeper, cpu_context, run
from tpbench.measure.session import MeasureSettings


def measured(here: Rank, settings: MeasureSettings) -> tuple[dict[str, Any], int]:
    """Return the columns and the number of steps. A step takes 5 ms on rank 0."""
    with simulated_time() as simulated:
        session = Sleeper(here, simulated, 0.005)
        _, columns = run(session, cpu_context(here), settings)
    return columns, session.steps


def test_the_slowest_rank_is_the_time_and_all_ranks_agree() -> None:
    settings = MeasureSettings(time_budget_s=1.0, min_iterations=5, max_iterations=40, precision=0.001)
    (columns, steps), (_, other_steps) = run_on_ranks(2, measured, settings)
    assert columns["time_ms"] == pytest.approx(10) == pytest.approx(np.median(columns["samples_ms"]))
    assert columns["skew_ms"] == pytest.approx(5)  # rank 0 sleeps half as long
    assert columns["iterations"] == len(columns["samples_ms"]) and columns["warmed_up"] is True
    assert steps == other_steps


class Meeting(Sleeper):
    """A session whose step begins when all ranks have come, and takes 5 ms."""

    def step(self) -> None:
        latest = torch.tensor(self.time.now_s, dtype=torch.float64)
        torch.distributed.all_reduce(latest, torch.distributed.ReduceOp.MAX)
        self.time.now_s = float(latest) + self.seconds


def beside_a_late_rank(here: Rank, session: type[Sleeper], late: bool) -> dict[str, Any]:
    with simulated_time() as simulated:
        settings = MeasureSettings(time_budget_s=0.1, min_iterations=5, max_iterations=5, late=late)
        return run(session(here, simulated, 0.005 / (1 + here.rank)), cpu_context(here), settings)[1]


def test_the_others_wait_for_a_late_rank_and_its_delay_does_not_count() -> None:
    waits, _ = run_on_ranks(2, beside_a_late_rank, Meeting, True)
    assert waits["late_ms"] == pytest.approx([5.0] * 4)
    alone, _ = run_on_ranks(2, beside_a_late_rank, Sleeper, True)  # without an exchange nobody waits
    assert alone["late_ms"] == pytest.approx([5.0, 4.95, 4.75, 4.0])
    assert "late_ms" not in run_on_ranks(2, beside_a_late_rank, Meeting, False)[0]
