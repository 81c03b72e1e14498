"""The columns of a measurement, from times, memory and costs that are known."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.lone_rank import lone_rank
from tests.support.sleeping_sessions import cpu_context
from tpbench.measure import rates, timers
from tpbench.measure import run as running
from tpbench.measure.session import Context, Costs

CPU = torch.device("cpu")
WALL = [np.array([1.0, 4.0]), np.array([6.0, 2.0]), np.array([5.0, 5.0])]
SO_FAR = {"floor_ms": 0.5, "bytes_moved": 10**7}


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    return cpu_context(lone_rank(monkeypatch, 3))


@pytest.mark.parametrize(
    ("stated", "floor_ms"),
    [
        ({}, 2.5),  # 2 ms of memory traffic, then communication
        ({"compute_ms": 9.0}, 9.0),
        ({"compute_ms": 1.0, "consecutive": True}, 3.5),
        ({"wire_beside_memory": True}, 2.0),
    ],
)
def test_the_floor_is_the_longer_of_traffic_and_products_or_their_sum(stated: dict[str, Any], floor_ms: float) -> None:
    costs = Costs(4 * 10**6, 77, flops=5, wire_ms=0.5, **stated)
    assert running.cost_columns(costs, 2.0) == {
        "bytes_moved": 4 * 10**6, "bytes_communicated": 77, "flops": 5, "copy_gb_per_s": 2.0, "floor_ms": floor_ms,
    }  # fmt: skip


def test_rates_are_of_the_device_time_where_there_is_one() -> None:
    found = running.time_columns({"wall": WALL, "device": [each / 2 for each in WALL]}, SO_FAR)
    assert (found["time_ms"], found["device_ms"], found["device_samples_ms"]) == (5.0, 2.5, [2.0, 3.0, 2.5])
    assert (found["fraction_of_floor"], found["gb_per_s"]) == (0.2, 4.0)


def test_the_copy_bandwidth_counts_bytes_read_and_written_of_the_slowest_rank(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [9.0, 3.0, 1.0, 2.0, 3.0, 1.0, 1.0, 9.0, 3.0, 1.0]  # the first copy does not count
    assert len(lengths) == rates.COPIES + 1
    times = itertools.accumulate(lengths, initial=100.0)
    monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setattr(rates, "BYTES", {"cpu": 4 * 10**6})
    assert rates.copy_gb_per_s(CPU) == pytest.approx(4e6 / 2.0 / 1e9)


def test_the_rate_of_products_counts_two_operations_for_each_term() -> None:
    class Watch:
        def ms(self, multiply: Any) -> float:
            multiply()
            return 4.0

    watch: Any = Watch()
    assert rates.gemm_tflops(torch.float32, CPU, watch) == pytest.approx(2 * 512**3 / 4e-3 / 1e12)
    assert rates.compute_ms(3 * 10**9, 1.5) == 2.0
