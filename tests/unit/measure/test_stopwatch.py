"""Differences of interleaved samples, and the order in which they are taken."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.lone_rank import lone_rank
from tests.support.sleeping_sessions import cpu_context
from tpbench.measure import stopwatch
from tpbench.measure.clock import Clock, Timed, abba_order
from tpbench.measure.stopwatch import Stopwatch, _affordable, do_nothing, paired_difference


def test_a_difference_is_taken_within_each_pass() -> None:
    """A clock that falls over time cancels, and one disturbed pass does not matter."""
    falling = [10.0, 12.0, 14.0, 16.0, 18.0]
    assert paired_difference([each + 1 for each in falling[:4]] + [90.0], falling) == 1


class SlowAtFirst(Clock):
    """A clock by which the first iteration of a step takes a second, and each other one 20 ms."""

    def interleaved(self, timed: Sequence[Timed], iterations: int) -> list[list[float]]:
        return [[1000.0, *[20.0] * (iterations - 1)] for _ in timed]


@pytest.mark.parametrize("warmups", [2, 3])
def test_the_last_warm_up_decides_how_often_a_step_is_timed(monkeypatch: pytest.MonkeyPatch, warmups: int) -> None:
    monkeypatch.setattr(stopwatch, "WARMUP_ITERATIONS", warmups)
    watch = Stopwatch(cpu_context(lone_rank(monkeypatch)))  # a second rank takes twice the time
    monkeypatch.setattr(watch, "_clock", lambda on_host: SlowAtFirst(watch.device, watch.cache))
    samples = watch.interleaved_ms((do_nothing, do_nothing), (do_nothing, do_nothing), most=20)
    assert samples == [[2000.0, *[40.0] * 6]] * 2  # 300 ms


def test_every_second_pass_is_reversed() -> None:
    assert abba_order(3, 3) == [0, 1, 2, 2, 1, 0, 0, 1, 2]


@pytest.mark.parametrize(("step_ms", "iterations"), [(0.0, 20), (15.0, 20), (30.0, 10), (134.0, 5)])
def test_long_steps_are_timed_less_often(step_ms: float, iterations: int) -> None:
    assert _affordable(step_ms, most=20) == iterations
    assert _affordable(step_ms, most=3) == 3
