"""The choice of block_auto between whole steps by both clocks."""

from __future__ import annotations

import pytest

from tpbench.workloads.tp_block.execution.autotune import PLAIN, Candidate, best_step

EAGER, GRAPHS = Candidate(PLAIN), Candidate(PLAIN, graphs=True)
OVERLAP, OVERLAP_GRAPHS = Candidate("copy_engine"), Candidate("copy_engine", graphs=True)


@pytest.mark.parametrize(
    ("times", "best"),
    [
        # Less device time, but more wall time: a choice by the device clock would lose.
        ({EAGER: (4.68, 2.80), OVERLAP: (6.84, 2.49)}, EAGER),
        # The graph of the overlapped step wins by both clocks, that of the plain step only by wall time.
        ({EAGER: (4.68, 2.8), OVERLAP: (6.84, 2.5), GRAPHS: (2.9, 2.8), OVERLAP_GRAPHS: (2.6, 2.6)}, OVERLAP_GRAPHS),
        # Less wall time at more device time doesn't help a loop that the device bounds.
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
    assert best_step(times) == best


def test_under_a_graph_the_plain_step_is_a_graph_too() -> None:
    times = {GRAPHS: (2.86, 2.81), OVERLAP_GRAPHS: (2.85, 2.80)}
    assert best_step(times, plain=GRAPHS) == GRAPHS
    assert best_step(times | {OVERLAP_GRAPHS: (2.58, 2.60)}, plain=GRAPHS) == OVERLAP_GRAPHS
