"""Times of parts of an iteration, on ranks over gloo or NCCL."""

from __future__ import annotations

import time

import pytest

from tests.ranks import Rank, enough_gpus, run_on_ranks
from tests.workloads.tp_block.cells import context
from tpbench.measure.stopwatch import Stopwatch, difference


def in_turns(here: Rank) -> tuple[str, list[list[float]]]:
    order: list[str] = []

    def timed(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    taken = Stopwatch(context(here)).in_turns(
        (lambda: timed("a", 0.001), lambda: order.append("(")),
        (lambda: timed("b", 0.02), lambda: order.append("[")),
        iterations=4,
    )
    return "".join(order), taken


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs")
def test_turns_alternate_and_each_is_restored_before() -> None:
    (order, taken), (_, taken_there) = run_on_ranks(2, in_turns)
    assert taken == taken_there  # the slowest rank's
    plain = order.replace("(a", "A").replace("[b", "B")
    assert plain.startswith("AABB")  # warm
    assert plain.endswith("ABBAABBA")
    short, long = taken
    assert len(short) == len(long) == 4 and difference(long, short) == pytest.approx(19, abs=15)


def test_a_difference_is_of_each_turns_own_times() -> None:
    """A clock that falls meanwhile is in neither difference, nor is a turn that something else disturbed."""
    falling = [10.0, 12.0, 14.0, 16.0, 18.0]
    assert difference([each + 1 for each in falling[:4]] + [90.0], falling) == 1
