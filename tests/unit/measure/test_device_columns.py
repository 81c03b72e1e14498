"""Columns about the GPUs of a cell. The GPU, its trace and the second rank are stand-ins."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pynvml
import pytest
import torch

from tests.support.fake_nvml import fake_gpu
from tests.support.lone_rank import lone_rank
from tests.support.simulated_time import SimulatedTime
from tests.support.sleeping_sessions import cpu_context
from tpbench.measure import bottleneck, gpu, measured_columns
from tpbench.measure.gpu import ClockWatch, this_gpu
from tpbench.measure.measured_columns import clock_columns, iteration_columns
from tpbench.measure.session import Context, Costs

COLUMNS = {"time_ms": 10.0, "bytes_moved": 4 * 10**6, "copy_gb_per_s": 2.0}  # 2 ms of traffic
GEMM, ALL_REDUCE = "nvjet_tst_128x256", "ncclDevKernel_AllReduce_Sum"
nothing: Any = None


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    """Return the context of rank 0 of two ranks on a GPU."""
    return dataclasses.replace(cpu_context(lone_rank(monkeypatch)), device=torch.device("cuda"))


def traced(monkeypatch: pytest.MonkeyPatch, *iterations: tuple[float, float]) -> list[int]:
    """Let traces have so many ms of products and of communication in each iteration. Return the asked iterations."""
    asked: list[int] = []

    def trace(step: Any, restore: Any, wall: Any, count: int, context: Any) -> list[Any]:
        asked.append(count)
        return [
            [(GEMM, 0, int(computing * 1e6), 7), (ALL_REDUCE, int(computing * 1e6), int(waiting * 1e6), 8)]
            for computing, waiting in iterations
        ]

    monkeypatch.setattr(bottleneck, "_traced", trace)
    return asked


def bound(context: Context, compute_ms: float = 1.0, **columns: float) -> dict[str, Any]:
    return bottleneck.bottleneck_columns(nothing, nothing, nothing, context, {**COLUMNS, **columns}, compute_ms)


def test_shares_are_medians_of_the_rank_that_communicates_least(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = traced(monkeypatch, (5.0, 1.0), (6.0, 4.0), (90.0, 2.0))
    found = bound(context)
    assert asked == [3]
    assert found == {
        "compute_share": pytest.approx(0.6), "communication_share": pytest.approx(0.2),
        "idle_share": pytest.approx(0.2), "bound": "memory",
    }  # fmt: skip
    assert bound(context, compute_ms=2.5)["bound"] == "compute"


@pytest.mark.parametrize(("time_ms", "iterations"), [(333.0, 3), (334.0, 1)])
def test_long_iterations_are_traced_once(
    time_ms: float, iterations: int, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = traced(monkeypatch, (1.0, 1.0))
    bound(context, time_ms=time_ms)
    assert asked == [iterations]


def test_without_a_trace_and_on_a_cpu_nothing_is_known(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    traced(monkeypatch)
    assert bound(context) == {}
    on_cpu = dataclasses.replace(context, device=torch.device("cpu"))
    assert bound(on_cpu) == iteration_columns(nothing, nothing, nothing, None, on_cpu, {}, nothing) == {}
    assert clock_columns(ClockWatch(None), on_cpu) == {}


def test_an_idle_share_of_exactly_the_limit_is_not_the_hosts(context: Context) -> None:
    even = bottleneck.Shares(0.4, 0.4, 0.2)
    assert even.bound(1.0, 1.0) == "memory"  # ties: neither the host, nor the wire, nor products


def test_energy_is_the_sum_over_ranks_of_a_second_of_iterations(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, calls = SimulatedTime(), []
    monkeypatch.setattr(gpu, "time", time)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    device = fake_gpu(time)

    def step() -> None:
        calls.append("step")
        time.sleep(0.25)
        device.nvml.used_j += 3.0

    found = gpu.iteration_energy_j(step, lambda: calls.append("restore"), 250.0, device, context)
    assert found == pytest.approx(3.0 + 6.0)  # the second rank has twice the numbers
    assert calls == ["restore", "step"] * 4 + ["synchronize"]
    assert gpu.iterations_of_sample(2000.0) == 1 and gpu.iterations_of_sample(300.0) == 4
    assert gpu.iterations_of_sample(300.0, sample_s=0.5) == 2
    assert gpu.iterations_of_sample(1e-6) == gpu.MOST_ITERATIONS  # by a replaced clock
    assert gpu.iteration_energy_j(step, step, 250.0, None, context) is None
    unknown = fake_gpu(time, "nvmlDeviceGetTotalEnergyConsumption")
    assert gpu.iteration_energy_j(step, step, 250.0, unknown, context) is None
    assert calls == ["restore", "step"] * 4 + ["synchronize"]  # no iteration runs for a number that is not known


def test_a_counter_that_stands_still_is_read_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time = SimulatedTime()
    monkeypatch.setattr(gpu, "time", time)
    assert gpu._updated_j(fake_gpu(time)) == 0.0
    assert time.now_s == pytest.approx(gpu.UPDATE_S, abs=0.01) == pytest.approx(0.15, abs=0.01)
    assert np.isnan(gpu._updated_j(fake_gpu(time, "nvmlDeviceGetTotalEnergyConsumption")))


def test_clocks_are_lowered_if_those_of_any_rank_are(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    time = SimulatedTime()
    device = fake_gpu(time)
    watch = ClockWatch(device, time.perf_counter)
    with watch:
        pass
    clocks = {"sm_clock_mhz": 1980, "memory_clock_mhz": 3201}
    assert clock_columns(watch, context) == {**clocks, "throttle_reasons": "none"}
    device.nvml.state = pynvml.nvmlClocksThrottleReasonSwPowerCap
    with watch:
        pass
    # Rank 1 has twice the bits of rank 0: the reason after this one.
    assert clock_columns(watch, context) == {**clocks, "throttle_reasons": "power thermal"}
    unknown = fake_gpu(time, "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetViolationStatus")
    silent = ClockWatch(unknown, time.perf_counter)
    with silent:
        pass
    assert clock_columns(silent, context) == clocks and clock_columns(ClockWatch(None), context) == {}


def test_an_iteration_has_the_columns_of_its_trace_and_its_energy(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Session:
        costs = Costs(0, 0, compute_ms=7.0)

        def restore(self) -> None:
            pass

    said: list[str] = []
    monkeypatch.setattr(measured_columns, "bottleneck_columns", lambda *given: {"compute_ms": given[-1]})
    session: Any = Session()
    for joules in (None, 2.5):
        monkeypatch.setattr(measured_columns, "iteration_energy_j", lambda *_, joules=joules: joules)
        found = iteration_columns(nothing, session, nothing, None, context, dict(COLUMNS), said.append)
        assert found == {"compute_ms": 7.0} | ({} if joules is None else {"energy_j": 2.5})
    assert said == ["tracing", "measuring energy"] * 2


def test_the_gpu_of_a_rank_is_the_one_with_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml:
        NVMLError = pynvml.NVMLError

        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
            if uuid != "GPU-abc":
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return "handle"

    nvml = Nvml()
    monkeypatch.setattr(gpu, "load_nvml", lambda: nvml)
    for uuid, handle in (("abc", "handle"), ("other", None)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, uuid=uuid: type("P", (), {"uuid": uuid}))
        found = this_gpu(torch.device("cuda"))
        assert (found and found.handle) == handle
    monkeypatch.setattr(gpu, "load_nvml", lambda: None)
    assert this_gpu(torch.device("cuda")) is None
