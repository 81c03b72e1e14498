"""The two timers and the stopwatch, with collectives and GPU events that are stand-ins."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.lone_rank import lone_rank
from tests.support.simulated_time import FakeEvents, simulated_time
from tests.support.sleeping_sessions import cpu_context
from tpbench.measure import timers
from tpbench.measure.timers import DeviceTimer, Stopwatch, WallTimer, cold_cache, do_nothing

CPU = torch.device("cpu")


def test_caches_are_evicted_by_a_buffer_of_all_ranks_together() -> None:
    buffer = cold_cache(CPU, 4)
    assert buffer.nbytes == 16 * 2**20
    assert cold_cache(CPU, 4) is buffer and cold_cache(CPU, 2**20).nbytes == 64


def test_wall_time_begins_when_the_ranks_are_lined_up(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    lone_rank(monkeypatch, log=log)
    with simulated_time() as time:

        def step(name: str, seconds: float) -> None:
            log.append(name)
            time.sleep(seconds)

        def restore() -> None:
            log.append("restore")
            time.sleep(5.0)

        cache: Any = SimpleNamespace(zero_=lambda: log.append("flush"))
        samples = WallTimer(CPU, cache).interleaved(
            [(lambda: step("a", 0.001), restore), (lambda: step("b", 0.02), restore)], 3
        )
    assert samples == [pytest.approx([1.0] * 3), pytest.approx([20.0] * 3)]
    before = ["restore", "flush", "all_reduce"]
    assert log == [word for name in "abbaab" for word in (*before, name)]


def test_the_wall_clock_keeps_the_parts_of_each_iteration_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    lone_rank(monkeypatch)
    with simulated_time() as time:
        cache: Any = SimpleNamespace(zero_=lambda: None)
        wall = WallTimer(CPU, cache)
        monkeypatch.setattr(timers, "synchronize", lambda device: time.sleep(0.003))
        assert wall.samples(lambda: time.sleep(0.001), lambda: None, 2) == pytest.approx([4.0] * 2)
        wall.warm_up(lambda: time.sleep(7.0), lambda: None, 2)
        wall.samples(lambda: None, lambda: None, 1)
        wall.warm_up(lambda: time.sleep(7.0), lambda: None, 0)
    assert wall.launches_ms == pytest.approx([1.0, 1.0, 0.0])  # until the step returned


def test_device_time_is_that_between_events_while_launches_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    cycles: list[int] = []
    on_gpu = timers.mark
    lone_rank(monkeypatch, log=log)
    with simulated_time() as time:
        monkeypatch.setattr(torch.cuda, "Event", FakeEvents(time, log))
        monkeypatch.setattr(timers, "mark", lambda _: on_gpu(torch.device("cuda")))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda number: (log.append("sleep"), cycles.append(number)))

        def step() -> None:
            log.append("step")
            time.sleep(0.002)

        def restore() -> None:
            log.append("restore")
            time.sleep(5.0)

        cache: Any = SimpleNamespace(zero_=lambda: log.append("flush"))
        samples = DeviceTimer(CPU, cache).samples(step, restore, 2)
    assert samples == pytest.approx([2.0] * 2)
    once = ["restore", "sleep", "flush", "all_reduce", "record", "step", "record"]
    assert log == ["restore", "step", "all_reduce", *once, *once]
    # The slowest rank queues for 4 ms; 50 us are added to one and a half times that.
    assert cycles == [pytest.approx((1.5 * 0.004 + 50e-6) * 2.0e9, rel=1e-6)] * 2


def test_a_stopwatch_warms_up_and_takes_the_slowest_ranks_median(monkeypatch: pytest.MonkeyPatch) -> None:
    here = lone_rank(monkeypatch)
    calls: list[str] = []
    lengths = iter([100.0, 100.0, 0.001, 0.005, 0.003, 0.004, 0.002, 7.0, 7.0, 0.001, 0.002, 0.003])
    with simulated_time() as time:
        watch = Stopwatch(cpu_context(here))

        def step() -> None:
            calls.append("step")
            time.sleep(next(lengths))

        assert watch.ms(step, lambda: calls.append("restore")) == pytest.approx(6.0)
        assert calls == ["restore", "step"] * 7
        assert watch.interleaved_ms((step, do_nothing), iterations=3) == [pytest.approx([2.0, 4.0, 6.0])]


def test_blocks_of_iterations_alternate_and_their_first_halves_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    here = lone_rank(monkeypatch)
    calls: list[str] = []
    with simulated_time() as time:
        watch = Stopwatch(cpu_context(here))

        def step(name: str) -> None:
            calls.append(name)
            time.sleep(0.001 * len(calls))

        blocks = watch.blocks_ms((lambda: step("a"), do_nothing), (lambda: step("b"), do_nothing), iterations=3)
        # lone_rank doubles times.
        assert blocks == [pytest.approx([4.0, 6.0, 22.0, 24.0]), pytest.approx([10.0, 12.0, 16.0, 18.0])]
        assert "".join(calls) == "aaabbbbbbaaa"


def test_steps_in_a_loop_alternate_in_blocks_with_one_barrier_each(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    here = lone_rank(monkeypatch, log=log)
    with simulated_time() as time:
        watch = Stopwatch(cpu_context(here))

        def step(name: str, seconds: float) -> None:
            log.append(name)
            time.sleep(seconds)

        timed = [
            (lambda: step("a", 0.003), lambda: log.append("r")),
            (lambda: step("b", 0.005), lambda: log.append("r")),
        ]
        # lone_rank doubles times: a step seems to take 6 ms, so that six of them fill 40 ms.
        assert watch.chained_ms(*timed, iterations=2) == [pytest.approx([6.0] * 2), pytest.approx([10.0] * 2)]
    blocks = [f"all_reduce{f'{name}r' * 6}" for name in "abba"]
    assert "".join(log).removesuffix("all_reduce" * 2).endswith("".join(blocks))
