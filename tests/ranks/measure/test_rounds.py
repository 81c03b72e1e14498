"""A cell's rounds: all ranks run the same ones, and time and iterations are limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.measure.test_run import Sleeper
from tests.support.ranks import Rank, run_on_ranks
from tpbench.measure import run as running
from tpbench.measure.interleaving import Wants
from tpbench.measure.session import Context
from tpbench.measure.settings import MeasureSettings


class Taker:
    """Gives every turn at once, until the cell can no more or has had so many."""

    def __init__(self, turns: int) -> None:
        self.left, self.wanted = turns, []  # type: ignore[var-annotated]

    def next(self, wants: Wants) -> bool:
        self.wanted.append(wants)
        self.left -= 1
        return self.left >= 0 and wants != Wants.NO_MORE


def measured(here: Rank, settings: MeasureSettings, turns: int) -> tuple[dict[str, Any], int, list[Wants]]:
    context = Context(
        here.rank, here.world_size, here.rank, here.world_size, 0, 1, here.group, here.group, torch.device("cpu")
    )
    session, taker = Sleeper(0.001), Taker(turns)
    _, columns = running.run(session, context, settings, 2.0, lambda what: None, turns=taker)  # type: ignore[arg-type]
    return columns, session.steps, taker.wanted


def test_rounds_of_all_ranks_until_the_median_is_known() -> None:
    settings = MeasureSettings(time_budget_s=5.0, min_iterations=8, max_iterations=500, precision=0.5)
    (columns, steps, wanted), (_, other_steps, asked) = run_on_ranks(2, measured, settings, 15)
    assert steps == other_steps and asked == []  # rank 0 asks for all
    assert wanted == [Wants.MORE] * 12 + [Wants.ENOUGH] * 4
    assert len(columns["round_ms"]) == 15 and "device_round_ms" not in columns
    assert len(columns["samples_ms"]) == columns["iterations"] >= 15
    assert (
        min(columns["samples_ms"]) <= min(columns["round_ms"]) <= max(columns["round_ms"]) <= max(columns["samples_ms"])
    )
    assert columns["time_ms"] >= 2  # the slowest rank's


@pytest.mark.parametrize(
    "settings",
    [
        MeasureSettings(time_budget_s=5.0, min_iterations=8, max_iterations=13, precision=0.0),
        MeasureSettings(time_budget_s=0.1, min_iterations=8, max_iterations=5000, precision=0.0),
    ],
)
def test_limits_are_kept(settings: MeasureSettings) -> None:
    columns, _, wanted = run_on_ranks(2, measured, settings, 1000)[0]
    assert wanted[-1] == Wants.NO_MORE and set(wanted[:-1]) == {Wants.MORE}
    assert columns["iterations"] <= settings.max_iterations
    assert sum(columns["samples_ms"]) / 1e3 < 3 * settings.time_budget_s
