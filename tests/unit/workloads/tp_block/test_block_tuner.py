"""The choice of block_auto between schedules, and between whole steps by both clocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tpbench.workloads.tp_block.execution.autotune import (
    PLAIN,
    Candidate,
    ScheduleTuner,
    StepTimes,
    best_step,
    fastest,
)

EAGER, GRAPHS = Candidate(PLAIN), Candidate(PLAIN, graphs=True)
OVERLAP, OVERLAP_GRAPHS = Candidate("copy_engine"), Candidate("copy_engine", graphs=True)


def test_the_plain_schedule_is_kept_unless_another_is_clearly_faster() -> None:
    assert fastest({"plain": 1.0, "ring": 0.995, "copy_engine": 1.2}) == "plain"
    assert fastest({"plain": 1.0, "ring": 0.985, "copy_engine": 0.9}) == "copy_engine"


@pytest.mark.parametrize(
    ("times", "best"),
    [
        # Less device time, but more wall time: a choice by the device clock would lose.
        ({EAGER: (4.68, 2.80), OVERLAP: (6.84, 2.49)}, EAGER),
        # The graph of the overlapped step wins by both clocks, that of the plain step only by wall time.
        ({EAGER: (4.68, 2.8), OVERLAP: (6.84, 2.5), GRAPHS: (2.9, 2.8), OVERLAP_GRAPHS: (2.6, 2.6)}, OVERLAP_GRAPHS),
        # Less wall time at more device time is no gain for who is bound by the device.
        ({EAGER: (4.68, 2.80), GRAPHS: (2.86, 2.85)}, EAGER),
        # Equal wall times: the device time decides.
        ({EAGER: (12.3, 11.2), OVERLAP: (12.3, 10.2)}, OVERLAP),
        # A gain below the noise is none.
        ({EAGER: (12.3, 11.2), OVERLAP: (12.25, 11.15)}, EAGER),
        ({EAGER: (12.3, 11.2), OVERLAP: (11.9, 10.2), GRAPHS: (12.0, 9.0)}, OVERLAP),
    ],
)  # fmt: skip
def test_a_step_is_chosen_only_if_it_loses_by_no_clock(
    times: dict[Candidate, tuple[float, float]], best: Candidate
) -> None:
    assert best_step({candidate: StepTimes(*both) for candidate, both in times.items()}) == best


def test_under_a_graph_the_plain_step_is_a_graph_too() -> None:
    times = {GRAPHS: StepTimes(2.86, 2.81), OVERLAP_GRAPHS: StepTimes(2.85, 2.80)}
    assert best_step(times, plain=GRAPHS) == GRAPHS
    assert best_step(times | {OVERLAP_GRAPHS: StepTimes(2.58, 2.60)}, plain=GRAPHS) == OVERLAP_GRAPHS


class TwoClocks:
    """A stopwatch by which each step takes 7 ms on the host and 4 ms on the device."""

    def interleaved_ms(self, *timed: Any, most: int, on_host: bool = False) -> list[list[float]]:
        return [[7.0 if on_host else 4.0] * 3 for _ in timed]


@pytest.mark.parametrize(
    ("device", "graph", "expected"),
    [("cuda", False, StepTimes(7.0, 4.0)), ("cuda", True, StepTimes(4.0, 4.0)), ("cpu", False, StepTimes(4.0, 4.0))],
)
def test_whole_steps_are_timed_by_both_clocks_where_the_host_counts(
    device: str, graph: bool, expected: StepTimes
) -> None:
    tuner = ScheduleTuner.__new__(ScheduleTuner)
    inputs: Any = SimpleNamespace(device=SimpleNamespace(type=device))
    context: Any = SimpleNamespace(inputs=inputs, graph=graph, stopwatch=TwoClocks())
    tuner.context, nothing = context, SimpleNamespace()
    candidates: Any = {EAGER: nothing, OVERLAP: nothing}
    assert tuner._times(candidates) == {EAGER: expected, OVERLAP: expected}
