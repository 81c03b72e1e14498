"""Differences of interleaved samples, and the order in which they are taken."""

from __future__ import annotations

from tpbench.measure.clock import abba_order
from tpbench.measure.stopwatch import paired_difference


def test_a_difference_is_taken_within_each_pass() -> None:
    """A clock that falls over time cancels, and one disturbed pass does not matter."""
    falling = [10.0, 12.0, 14.0, 16.0, 18.0]
    assert paired_difference([each + 1 for each in falling[:4]] + [90.0], falling) == 1


def test_every_second_pass_is_reversed() -> None:
    assert abba_order(3, 3) == [0, 1, 2, 2, 1, 0, 0, 1, 2]
