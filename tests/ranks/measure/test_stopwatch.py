"""Times of parts of an iteration, on ranks over gloo or NCCL."""

from __future__ import annotations

import time

import pytest
import torch

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import context
from tpbench.measure.clock import SLEEP_CYCLES_PER_S
from tpbench.measure.stopwatch import Stopwatch, difference


def in_turns(here: Rank) -> tuple[str, str, list[list[float]]]:
    """The kind of device, the order in which two were run, and their times."""
    order: list[str] = []

    def timed(name: str, seconds: float) -> None:
        order.append(name)
        if here.device.type == "cuda":  # a host that sleeps does not show there
            torch.cuda._sleep(int(seconds * SLEEP_CYCLES_PER_S))
        else:
            time.sleep(seconds)

    taken = Stopwatch(context(here)).in_turns(
        (lambda: timed("a", 0.001), lambda: order.append("(")),
        (lambda: timed("b", 0.02), lambda: order.append("[")),
        iterations=4,
    )
    return here.device.type, "".join(order), taken


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs")
def test_turns_alternate_and_each_is_restored_before() -> None:
    (device, order, taken), (_, _, taken_there) = run_on_ranks(2, in_turns)
    assert taken == taken_there  # the slowest rank's
    plain = order.replace("(a", "A").replace("[b", "B")
    # Warm-up, then the turns; the device clock queues one of each before any, to learn how long its launches take.
    assert plain == {"cpu": "AABB" + "ABBAABBA", "cuda": "AAABBB" + "AB" + "ABBAABBA"}[device]
    short, long = taken
    assert len(short) == len(long) == 4 and difference(long, short) > 10


def test_a_difference_is_of_each_turns_own_times() -> None:
    """A clock that falls meanwhile is in neither difference, nor is a turn that something else disturbed."""
    falling = [10.0, 12.0, 14.0, 16.0, 18.0]
    assert difference([each + 1 for each in falling[:4]] + [90.0], falling) == 1
