"""Clocks, throttling and energy of a GPU whose NVML is a stand-in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pynvml
import pytest
import torch

from tests.support.fake_nvml import fake_gpu
from tests.support.lone_rank import lone_rank
from tests.support.simulated_time import SimulatedTime
from tests.support.sleeping_sessions import cpu_context
from tpbench.measure import gpu
from tpbench.measure.gpu import ClockWatch, this_gpu
from tpbench.measure.session import Context

COUNTED = "nvmlDeviceGetViolationStatus"


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    """Return the context of rank 0 of two ranks on a GPU."""
    return dataclasses.replace(cpu_context(lone_rank(monkeypatch)), device=torch.device("cuda"))


def reasons_of(
    violated_ns: dict[int, int] | None = None, seconds: float = 1.0, unknown: tuple[str, ...] = ()
) -> set[str] | None:
    """The reasons that a watch of so many seconds finds, in which violation times grow by `violated_ns`."""
    time = SimulatedTime()
    device = fake_gpu(time, *unknown)
    device.nvml.violations_ns = {pynvml.NVML_PERF_POLICY_POWER: 5 * 10**9}
    watch = ClockWatch(device, time.perf_counter)
    for _ in range(2):
        time.sleep(9.0)  # time and violations between the blocks do not count
        for policy in violated_ns or {}:
            device.nvml.violations_ns[policy] = device.nvml.violations_ns.get(policy, 0) + 10**9
        with watch:
            time.sleep(seconds / 2)
            for policy, ns in (violated_ns or {}).items():
                device.nvml.violations_ns[policy] += ns // 2
    return watch.reasons()


def test_reasons_are_those_of_the_watched_time() -> None:
    assert reasons_of() == set()  # 5 s of power violations were before the watch
    assert reasons_of({pynvml.NVML_PERF_POLICY_POWER: 20_000_000}) == {"power"}
    assert reasons_of({pynvml.NVML_PERF_POLICY_LOW_UTILIZATION: 10**9}) == set()


def test_a_hundredth_of_the_time_is_the_least_that_counts() -> None:
    violated = {pynvml.NVML_PERF_POLICY_THERMAL: 20_000_000}
    assert reasons_of(violated, seconds=1.0) == {"thermal"}
    assert reasons_of(violated, seconds=3.0) == set()


def test_a_gpu_that_does_not_say_has_unknown_reasons() -> None:
    assert ClockWatch(None).reasons() is None
    assert reasons_of({pynvml.NVML_PERF_POLICY_THERMAL: 10**9}, unknown=(COUNTED,)) is None


def test_clocks_are_columns_or_missing() -> None:
    known, unknown = fake_gpu(SimulatedTime()), fake_gpu(SimulatedTime(), "nvmlDeviceGetClockInfo")
    assert known.clocks_mhz() == {"sm_clock_mhz": 1980, "memory_clock_mhz": 3201}
    assert unknown.clocks_mhz() == {}


@pytest.mark.parametrize(
    ("step_s", "sample_s", "iterations"), [(0.25, 1.0, 4), (0.3, 1.0, 4), (0.3, 0.5, 2), (2.0, 1.0, 1)]
)
def test_energy_is_the_sum_over_ranks_of_a_second_of_iterations(
    step_s: float, sample_s: float, iterations: int, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, calls = SimulatedTime(), []
    monkeypatch.setattr(gpu, "time", time)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    device = fake_gpu(time)

    def iteration() -> None:
        calls.append("step")
        time.sleep(step_s)
        device.nvml.used_j += 3.0

    found = gpu.iteration_energy_j(iteration, step_s * 1e3, device, context, sample_s)
    assert found == pytest.approx(3.0 + 6.0)  # the second rank has twice the numbers
    assert calls == ["step"] * iterations + ["synchronize"]
    unknown = fake_gpu(time, "nvmlDeviceGetTotalEnergyConsumption")
    for without in (None, unknown):
        assert gpu.iteration_energy_j(iteration, 250.0, without, context) is None
    assert len(calls) == iterations + 1  # no iteration runs for a number that is not known


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
    assert watch.columns(context) == {**clocks, "throttle_reasons": "none"}
    with watch:
        time.sleep(0.1)
        device.nvml.violations_ns[pynvml.NVML_PERF_POLICY_POWER] = 10**8
    assert watch.columns(context) == {**clocks, "throttle_reasons": "power"}
    unknown = fake_gpu(time, COUNTED)
    silent = ClockWatch(unknown, time.perf_counter)
    with silent:
        pass
    assert silent.columns(context) == clocks and ClockWatch(None).columns(context) == {}


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
