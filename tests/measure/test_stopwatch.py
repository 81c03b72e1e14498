"""Times of parts of an iteration, on ranks over gloo or NCCL."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.ranks import Rank, enough_gpus, run_on_ranks
from tests.workloads.tp_block.cells import context
from tpbench.measure.stopwatch import Stopwatch


def in_turns(here: Rank) -> tuple[str, list[float]]:
    order: list[str] = []

    def timed(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    taken = Stopwatch(context(here)).in_turns(
        (lambda: timed("a", 0.001), lambda: order.append("(")), (lambda: timed("b", 0.02), lambda: order.append("["))
    )
    return "".join(order), taken


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs")
def test_turns_alternate_and_each_is_restored_before() -> None:
    (order, taken), (_, taken_there) = run_on_ranks(2, in_turns)
    assert taken == taken_there  # the slowest rank's
    plain = order.replace("(a", "A").replace("[b", "B")
    assert plain.startswith("AABB")  # warm
    assert [name for name, _ in itertools.groupby(plain[4:])] == ["A", "B", "A", "B", "A"]  # A B, B A, A B, B A
    assert plain.count("A") == plain.count("B")
