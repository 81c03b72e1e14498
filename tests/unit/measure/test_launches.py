"""The time that an iteration keeps the host: `launch_ms`. The GPU and the second rank, twice as slow, are stand-ins."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.lone_rank import lone_rank
from tests.support.ranks import Rank
from tests.support.simulated_time import SimulatedTime, simulated_time
from tests.support.sleeping_sessions import Sleeper, cpu_context
from tests.unit.measure.test_clock import CPU, LoggedCache
from tests.unit.measure.test_rounds import Queue
from tpbench.measure import rank_memory
from tpbench.measure import run as running
from tpbench.measure.clock import WallClock
from tpbench.measure.measured_columns import launch_samples, time_columns
from tpbench.measure.session import Context
from tpbench.measure.settings import MeasureSettings

DEVICE_S = 0.003
"""How long the stand-in of a GPU works after a step has returned."""
COLD_S = 0.1
"""How long the host allocates memory in the first step after the result was freed."""


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    return on_gpu(lone_rank(monkeypatch))


def on_gpu(here: Rank) -> Context:
    return dataclasses.replace(cpu_context(here), device=torch.device("cuda"))


def wall_clock(time: SimulatedTime) -> WallClock:
    """Return a wall clock whose device works for `DEVICE_S`."""
    cache: Any = LoggedCache([])
    wall = WallClock(CPU, cache)
    wall._synchronize = lambda: time.sleep(DEVICE_S)  # type: ignore[method-assign]
    return wall


class Launching(Sleeper):
    """A session whose step keeps the host for a known time, and for longer if its memory was freed."""

    cold = True

    def step(self) -> None:
        self.steps += 1
        self.time.sleep(COLD_S if self.cold else self.seconds)
        self.cold = False

    def release(self) -> None:
        self.cold = True


def measured(
    context: Context, monkeypatch: pytest.MonkeyPatch, grants: int = 0, replay_s: float | None = None, **settings: Any
) -> dict[str, Any]:
    """Return the columns of a session that keeps the host for 2 ms. With `grants` it is measured in rounds, and with
    `replay_s` by replays of a graph, which keep the host for so long."""
    interleaved = Queue(grants) if grants else None
    with simulated_time() as time:
        wall = wall_clock(time)
        monkeypatch.setattr(running, "ColdCache", lambda *_: wall.cache)
        monkeypatch.setattr(running, "WallClock", lambda *_: wall)
        monkeypatch.setattr(running, "DeviceClock", lambda *_: wall_clock(time))
        monkeypatch.setattr(running, "this_gpu", lambda _: None)
        monkeypatch.setattr(running, "iteration_columns", lambda *_: {})
        monkeypatch.setattr(running, "_captured", lambda *_: lambda: time.sleep(replay_s or 0.0))
        monkeypatch.setattr(rank_memory, "extra_peak", lambda _: contextlib.nullcontext(rank_memory.Peak()))
        monkeypatch.setattr(rank_memory, "fill_freed_with_nan", lambda *_: None)
        session = Launching(Rank(0, 2, mock.ANY, CPU), time, 0.002)
        wanted = MeasureSettings(graph=replay_s is not None, **settings)
        with mock.patch.multiple(torch.cuda, synchronize=lambda *_: None, empty_cache=lambda: None):
            return running.run(session, context, wanted, 2.0, lambda _: None, interleaved=interleaved)[1]


def test_it_ends_when_the_step_returns_not_when_the_device_is_idle(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = measured(context, monkeypatch, max_iterations=4)
    assert columns["launch_ms"] == pytest.approx(2 * 2.0)  # of the slower rank
    assert columns["time_ms"] == pytest.approx(2 * (2.0 + 3.0))


def test_with_a_graph_it_is_the_time_of_the_replay(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = measured(context, monkeypatch, replay_s=0.00001, max_iterations=4)
    assert columns["launch_ms"] == pytest.approx(2 * 0.01)


def test_warm_ups_between_rounds_do_not_count(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round has one iteration, after a warm-up that allocates freed memory."""
    columns = measured(context, monkeypatch, grants=4, max_iterations=24)
    assert columns["iterations"] == len(columns["round_ms"]) == 4
    assert columns["launch_ms"] == pytest.approx(2 * 2.0)


def test_a_pass_longer_than_the_budget_is_also_the_launch(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = measured(context, monkeypatch, time_budget_s=0.05)
    assert columns["iterations"] == 1
    assert columns["launch_ms"] == pytest.approx(2 * COLD_S * 1e3)


def test_it_is_the_median_over_iterations(context: Context) -> None:
    lengths = iter([9.0, 9.0, 0.001, 0.004, 0.002])
    with simulated_time() as time:
        wall = wall_clock(time)
        wall.warm_up(lambda: time.sleep(next(lengths)), lambda: None, 2)
        samples = wall.samples(lambda: time.sleep(next(lengths)), lambda: None, 3)
    launches = launch_samples(wall, len(samples), context)
    so_far = {"floor_ms": 1.0, "bytes_moved": 1}
    columns = time_columns(object(), context, launches or [], launches, launches, so_far, lambda _: None)
    assert columns["launch_ms"] == pytest.approx(2 * 2.0)


def test_a_wait_for_the_device_within_the_step_counts(context: Context) -> None:
    with simulated_time() as time:
        wall = wall_clock(time)

        def step() -> None:
            time.sleep(0.001)
            wall._synchronize()

        wall.samples(step, lambda: None, 1)
    (launch,) = launch_samples(wall, 1, context) or []
    assert launch.tolist() == pytest.approx([4.0, 8.0])


def test_on_a_cpu_there_are_no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    here = lone_rank(monkeypatch)
    with simulated_time() as time:
        wall = wall_clock(time)
        wall.samples(lambda: time.sleep(0.001), lambda: None, 2)
        assert launch_samples(wall, 2, cpu_context(here)) is None
        settings = MeasureSettings(max_iterations=2)
        columns = running.run(Sleeper(here, time, 0.001), cpu_context(here), settings, 2.0, lambda _: None)[1]
    assert columns["time_ms"] > 0 and "launch_ms" not in columns
