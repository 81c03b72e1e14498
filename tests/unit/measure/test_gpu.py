"""Clocks, throttling and energy of a GPU whose NVML is a stand-in."""

from __future__ import annotations

import pynvml
import pytest
import torch

from tests.support.fake_nvml import fake_gpu
from tests.support.simulated_time import SimulatedTime
from tpbench.measure import gpu
from tpbench.measure.gpu import ClockWatch, this_gpu

STATE = "nvmlDeviceGetCurrentClocksThrottleReasons"
COUNTED = "nvmlDeviceGetViolationStatus"


def reasons_of(
    state: int = 0, violated_ns: dict[int, int] | None = None, seconds: float = 1.0, unknown: tuple[str, ...] = ()
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
            device.nvml.state = state
        device.nvml.state = 0
    return watch.reasons()


def test_reasons_are_those_of_the_watched_time_and_of_its_end() -> None:
    assert reasons_of() == set()  # 5 s of power violations were before the watch
    assert reasons_of(pynvml.nvmlClocksThrottleReasonGpuIdle) == set()
    assert reasons_of(pynvml.nvmlClocksThrottleReasonHwThermalSlowdown) == {"thermal"}
    both = pynvml.nvmlClocksThrottleReasonSwPowerCap | pynvml.nvmlClocksThrottleReasonHwSlowdown
    assert reasons_of(both) == {"power", "hw_slowdown"}
    assert reasons_of(violated_ns={pynvml.NVML_PERF_POLICY_POWER: 20_000_000}) == {"power"}
    assert reasons_of(violated_ns={pynvml.NVML_PERF_POLICY_LOW_UTILIZATION: 10**9}) == set()


def test_a_hundredth_of_the_time_is_the_least_that_counts() -> None:
    violated = {pynvml.NVML_PERF_POLICY_THERMAL: 20_000_000}
    assert reasons_of(violated_ns=violated, seconds=1.0) == {"thermal"}
    assert reasons_of(violated_ns=violated, seconds=3.0) == set()


def test_a_gpu_that_does_not_say_has_unknown_reasons() -> None:
    assert ClockWatch(None).reasons() is None
    assert reasons_of(unknown=(STATE, COUNTED)) is None
    assert reasons_of(4, {pynvml.NVML_PERF_POLICY_THERMAL: 10**9}, unknown=(STATE,)) == {"thermal"}
    assert reasons_of(4, {pynvml.NVML_PERF_POLICY_THERMAL: 10**9}, unknown=(COUNTED,)) == {"power"}


def test_clocks_are_columns_or_missing() -> None:
    known, unknown = fake_gpu(SimulatedTime()), fake_gpu(SimulatedTime(), "nvmlDeviceGetClockInfo")
    assert known.clocks_mhz() == {"sm_clock_mhz": 1980, "memory_clock_mhz": 3201}
    assert unknown.clocks_mhz() == {}


@pytest.mark.parametrize("step_s", [0.0003, 0.4])
def test_energy_is_read_right_after_the_counter_changed(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    time = SimulatedTime()
    monkeypatch.setattr(gpu, "time", time)
    device = fake_gpu(time)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        time.sleep(step_s)
        device.nvml.used_j += 3.0

    iterations = gpu.iterations_of_sample(step_s * 1e3)
    assert iterations * step_s >= gpu.SAMPLE_S
    assert gpu.sampled_j(step, iterations, device) == pytest.approx(3.0 * iterations)
    assert steps == iterations


def test_without_an_energy_counter_nothing_is_known() -> None:
    assert fake_gpu(SimulatedTime(), "nvmlDeviceGetTotalEnergyConsumption").energy_j() is None


def test_a_cpu_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "load_nvml", lambda: pytest.fail("NVML was opened"))
    assert this_gpu(torch.device("cpu")) is None
