"""Times of parts of an iteration, on ranks over gloo or NCCL."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from tests.support.ranks import Rank, ranks_here, run_on_ranks
from tests.support.simulated_time import simulated_time
from tests.support.tp_block import context
from tpbench.measure.clock import SLEEP_CYCLES_PER_S, ColdCache, WallClock
from tpbench.measure.stopwatch import Stopwatch, do_nothing, paired_difference


def interleaved(here: Rank) -> tuple[str, str, list[list[float]]]:
    """The kind of device, the order in which two steps were run, and their times."""
    order: list[str] = []
    cuda = here.device.type == "cuda"
    with contextlib.nullcontext() if cuda else simulated_time() as simulated:

        def step(name: str, seconds: float) -> None:
            order.append(name)
            if simulated is None:  # a host's sleep does not show in device time
                torch.cuda._sleep(int(seconds * SLEEP_CYCLES_PER_S))
            else:
                simulated.sleep(seconds * (1 + here.rank))

        samples = Stopwatch(context(here)).interleaved_ms(
            (lambda: step("a", 0.001), lambda: order.append("(")),
            (lambda: step("b", 0.02), lambda: order.append("[")),
            iterations=4,
        )
    return here.device.type, "".join(order), samples


def test_steps_alternate_in_abba_order_and_each_is_restored_before() -> None:
    results = run_on_ranks(ranks_here(2), interleaved)
    device, order, samples = results[0]
    slowest = len(results)  # in units of the first rank's time
    assert all(samples_there == samples for _, _, samples_there in results)  # the slowest rank's
    restored = order.replace("(a", "A").replace("[b", "B")
    # Warm-up, then the samples. The device clock first queues one of each step to learn how long its launches take.
    assert restored == {"cpu": "AABB" + "ABBAABBA", "cuda": "AAABBB" + "AB" + "ABBAABBA"}[device]
    short, long = samples
    if device == "cpu":
        assert short == pytest.approx([slowest] * 4) and long == pytest.approx([20 * slowest] * 4)
    else:
        assert len(short) == len(long) == 4
        assert paired_difference(long, short) > 10


def real_times_ms(here: Rank) -> list[float]:
    clock = WallClock(here.device, ColdCache(here.device, here.world_size))
    return clock.samples(lambda: time.sleep(0.01), do_nothing, 3)


def test_the_wall_clock_measures_the_hosts_time() -> None:
    for samples in run_on_ranks(ranks_here(2), real_times_ms):
        assert len(samples) == 3 and min(samples) >= 10
