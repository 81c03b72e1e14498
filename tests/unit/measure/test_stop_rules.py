"""When a cell has run enough: the sizes of its blocks, or the lengths of its rounds and the requests after each."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lone_rank import lone_rank
from tests.support.simulated_time import simulated_time
from tests.support.sleeping_sessions import Sleeper, cpu_context
from tpbench.measure import timers
from tpbench.measure.run import Cell
from tpbench.measure.session import MeasureSettings
from tpbench.measure.stop_rules import MIN_ROUNDS, ROUNDS, ClockRun, RoundRequest, next_cells

SETTINGS: dict[str, Any] = {"time_budget_s": 2.4, "min_iterations": 1, "max_iterations": 10**6, "precision": 0.0}


VARYING = [np.array([1.0, 2.0]), np.array([1.0, 3.0])]
EQUAL = [np.array([1.0, 2.0])] * 2


@pytest.mark.parametrize(
    ("samples", "spent_s", "limits", "block"),
    [
        ([], 0.0, {}, 5),
        ([], 0.0, {"max_iterations": 3}, 3),
        (VARYING * 14, 0.1, {}, 2),  # never more than 30
        (VARYING * 15, 0.1, {}, 0),
        (VARYING * 14, 1.0, {}, 0),  # no time is left
        (VARYING * 5, 0.2, {"max_iterations": 1000}, 10),  # as many again
        (VARYING * 5, 0.2, {"max_iterations": 1000, "min_iterations": 25}, 15),  # as many as are missing
        (VARYING * 5, 0.2, {"max_iterations": 1000, "min_iterations": 500}, 40),  # the time is enough for so many
        (VARYING * 5, 0.99, {"max_iterations": 1000}, 1),  # at least one
        (EQUAL * 5, 0.2, {"min_iterations": 10}, 0),  # precise, and enough of them
        (EQUAL * 5, 0.2, {"min_iterations": 11}, 10),
        (VARYING * 5, 0.2, {"min_iterations": 10}, 10),  # enough, but not precise
        (VARYING * 5, 0.2, {"min_iterations": 10, "precision": 0.5}, 0),
    ],
)
def test_the_next_block(samples: list[np.ndarray], spent_s: float, limits: dict[str, Any], block: int) -> None:
    settings = {"time_budget_s": 1.0, "min_iterations": 20, "max_iterations": 30, "precision": 0.0} | limits
    found = rounds_of([], spent_s, **settings)
    found.rounds = [samples] if samples else []
    assert found.next_block() == block


def rounds_of(lengths: list[int], spent_s: float, milliseconds: float = 1.0, **settings: Any) -> ClockRun:
    """Return rounds of so many iterations, which took `spent_s` together."""
    nothing: Any = None
    found = ClockRun(nothing, nothing, nothing, nothing, MeasureSettings(**{**SETTINGS, **settings}))
    found.rounds = [[np.array([milliseconds / 2, milliseconds])] * length for length in lengths]
    found.spent_s = spent_s
    return found


@pytest.mark.parametrize(
    ("found", "request_"),
    [
        (rounds_of([], 0.0), RoundRequest.MORE),
        (rounds_of([2] * MIN_ROUNDS, 1.0), RoundRequest.ENOUGH),
        (rounds_of([2] * (MIN_ROUNDS - 1), 1.0), RoundRequest.MORE),
        (rounds_of([2] * MIN_ROUNDS, 1.0, min_iterations=2 * MIN_ROUNDS), RoundRequest.ENOUGH),
        (rounds_of([2] * MIN_ROUNDS, 1.0, min_iterations=2 * MIN_ROUNDS + 1), RoundRequest.MORE),
        (rounds_of([2] * MIN_ROUNDS, 2.3999), RoundRequest.ENOUGH),
        (rounds_of([2] * MIN_ROUNDS, 2.4), RoundRequest.NO_MORE),
        # Twelve rounds have 24 iterations, and the next one has one more.
        (rounds_of([2] * MIN_ROUNDS, 1.0, max_iterations=25), RoundRequest.ENOUGH),
        (rounds_of([2] * MIN_ROUNDS, 1.0, max_iterations=24), RoundRequest.NO_MORE),
    ],
)
def test_the_request_after_a_round(found: ClockRun, request_: RoundRequest) -> None:
    assert found.request(found.next_round(), MIN_ROUNDS) == request_


def test_a_median_that_varies_needs_more_rounds() -> None:
    found = rounds_of([2] * MIN_ROUNDS, 1.0)
    found.rounds[::2] = [[np.array([3.0, 2.0])] * 2 for _ in found.rounds[::2]]
    assert found.request(2, MIN_ROUNDS) == RoundRequest.MORE
    assert found.medians_ms == [3.0, 1.0] * (MIN_ROUNDS // 2)
    assert len(found.samples) == 2 * MIN_ROUNDS


def test_an_interleaved_cell_runs_a_round_of_each_clock_until_it_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    here = lone_rank(monkeypatch)
    with simulated_time() as time:
        settings = MeasureSettings(**{**SETTINGS, "time_budget_s": 2.41})
        cell = Cell(lambda: Sleeper(here, time, 0.001), cpu_context(here), settings, 2.0, interleaved=True)
        cell.begin()
        requests = [cell.request()]
        for _ in range(3):
            cell.run_round()
            requests.append(cell.request())
        columns = cell.finish().columns
    assert requests == [RoundRequest.MORE] * 4
    assert columns["iterations"] == 2 + 99 + 99  # 0.1 s each, after one iteration of warm-up
    assert columns["round_ms"] == pytest.approx([2.0] * 3) == columns["chained_round_ms"]  # the slowest rank's
    assert not cell.runs and ROUNDS == 24


def test_outputs_are_poisoned_before_the_last_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    here, poisoned = lone_rank(monkeypatch), list[bool]()

    class Writing(Sleeper):
        output = torch.ones(3)

        def outputs(self) -> list[torch.Tensor]:
            return [self.output]

        def step(self) -> None:
            poisoned.append(bool(self.output.isnan().all()))

    with simulated_time() as time:
        session = Writing(here, time, 0.001)
        wall = timers.WallTimer(here.device, torch.empty(0))
        settings = MeasureSettings(max_iterations=5)
        ClockRun(wall, session.step, session, cpu_context(here), settings).until_precise()
    assert poisoned == [False] * 7 + [True]  # three iterations of warm-up, and a block of five


@given(st.dictionaries(st.integers(0, 3), st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1))
def test_cells_take_turns_until_none_needs_more(wanted: dict[int, tuple[int, int]]) -> None:
    """`wanted`: by cell, the rounds until its median is precise, and the most that it can run."""

    def request(cell: int) -> RoundRequest:
        enough, most = wanted[cell]
        if order.count(cell) >= most:
            return RoundRequest.NO_MORE
        return RoundRequest.MORE if order.count(cell) < enough else RoundRequest.ENOUGH

    order: list[int] = []
    requests = {cell: request(cell) for cell in wanted}
    for cell in next_cells(requests):
        order.append(cell)
        requests[cell] = request(cell)
    assert RoundRequest.MORE not in requests.values()
    assert all(order.count(cell) <= most for cell, (_, most) in wanted.items())
    if all(most == 6 for _, most in wanted.values()):
        pairs = -(-max(enough for enough, _ in wanted.values()) // 2)
        assert len(order) == 2 * pairs * len(wanted)
        for at in range(0, len(order), 2 * len(wanted)):
            there, back = order[at : at + len(wanted)], order[at + len(wanted) : at + 2 * len(wanted)]
            assert set(there) == set(wanted) and back == there[::-1]


def test_no_cell_always_follows_the_same_one() -> None:
    requests = dict.fromkeys(range(4), RoundRequest.MORE)
    order = list(itertools.islice(next_cells(requests), 200))
    assert len(set(itertools.pairwise(order))) == 16
    assert order == list(itertools.islice(next_cells(requests), 200))  # on every rank
