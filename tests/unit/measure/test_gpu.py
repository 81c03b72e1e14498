"""Clocks and throttling of a GPU whose NVML is a stand-in."""

import dataclasses
from types import SimpleNamespace

import pynvml
import pytest
import torch

from tests.support.lone_rank import lone_rank
from tests.support.simulated_time import SimulatedTime
from tests.support.sleeping_sessions import cpu_context
from tpbench.measure import gpu
from tpbench.measure.gpu import ClockWatch
from tpbench.measure.session import Context


class FakeNvml:
    """The calls of NVML that a rank uses. A call that the GPU does not know raises NVML's error."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *unknown: str) -> None:
        """`unknown`: calls that the GPU does not know."""
        self.unknown = unknown
        self.violations_ns: dict[int, int] = {}
        self.busy: dict[str, int] = {}
        """The utilization of each GPU."""

    def __getattr__(self, name: str) -> object:
        return getattr(pynvml, name)  # constants

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-abc":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{'abc'[index:]}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=self.busy.get(handle, 0))

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
        self._called("nvmlDeviceGetClockInfo")
        clocks: dict[int, int] = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}
        return clocks[kind]

    def nvmlDeviceGetViolationStatus(self, handle: object, policy: int) -> SimpleNamespace:
        self._called("nvmlDeviceGetViolationStatus")
        return SimpleNamespace(violationTime=self.violations_ns.get(policy, 0), referenceTime=0)

    def _called(self, name: str) -> None:
        if name in self.unknown:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def fake_watch(
    monkeypatch: pytest.MonkeyPatch, time: SimulatedTime, *unknown: str, uuid: str = "abc"
) -> tuple[ClockWatch, FakeNvml]:
    """Return the watch of a GPU of such an NVML, with that NVML."""
    nvml = FakeNvml(*unknown)
    monkeypatch.setattr(gpu, "load_nvml", lambda: nvml)
    monkeypatch.setattr(gpu, "visible_gpus", lambda: [("GPU-abc", "0"), ("GPU-bc", "1")])
    monkeypatch.setattr(gpu, "time", time)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    return ClockWatch(torch.device("cuda")), nvml


COUNTED = "nvmlDeviceGetViolationStatus"
CLOCKS = {"sm_clock_mhz": 1980, "memory_clock_mhz": 3201}


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    """The context of rank 0 of two ranks on a GPU."""
    return dataclasses.replace(cpu_context(lone_rank(monkeypatch)), device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("violated_ns", "seconds", "unknown", "reasons"),
    [
        ({}, 1.0, (), "none"),  # 5 s of power violations were before the watch
        ({pynvml.NVML_PERF_POLICY_POWER: 20_000_000}, 1.0, (), "power"),
        ({pynvml.NVML_PERF_POLICY_LOW_UTILIZATION: 10**9}, 1.0, (), "none"),
        # A hundredth of the time is the least that counts.
        ({pynvml.NVML_PERF_POLICY_THERMAL: 20_000_000}, 1.0, (), "thermal"),
        ({pynvml.NVML_PERF_POLICY_THERMAL: 20_000_000}, 3.0, (), "none"),
        ({pynvml.NVML_PERF_POLICY_THERMAL: 10**9}, 1.0, (COUNTED,), None),
    ],
)
def test_reasons_are_those_of_the_watched_time(
    violated_ns: dict[int, int], seconds: float, unknown: tuple[str, ...], reasons: str | None,
    context: Context, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    time = SimulatedTime()
    watch, nvml = fake_watch(monkeypatch, time, *unknown)
    nvml.violations_ns = {pynvml.NVML_PERF_POLICY_POWER: 5 * 10**9}
    for _ in range(2):
        time.sleep(9.0)  # time and violations between the blocks do not count
        for policy in violated_ns:
            nvml.violations_ns[policy] = nvml.violations_ns.get(policy, 0) + 10**9
        with watch:
            time.sleep(seconds / 2)
            for policy, ns in violated_ns.items():
                nvml.violations_ns[policy] += ns // 2
    assert watch.columns(context) == CLOCKS | ({} if reasons is None else {"throttle_reasons": reasons})


@pytest.mark.parametrize(
    ("busy", "beside"),
    [
        ({}, False),
        ({"GPU-abc": 99, "GPU-bc": 99}, False),  # the job's own GPUs
        ({"GPU-c": 3}, True),
    ],
)
def test_work_on_a_gpu_that_the_job_does_not_have_is_noted(
    busy: dict[str, int], beside: bool, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, nvml = fake_watch(monkeypatch, SimulatedTime())
    with watch:
        nvml.busy = busy
    with watch:  # the other work is noted although it ends before the measurement does
        nvml.busy = {}
    assert watch.columns(context).get("beside") == ("another-sweep" if beside else None)


def test_without_nvml_or_a_gpu_of_this_uuid_nothing_is_known(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    other, _ = fake_watch(monkeypatch, SimulatedTime(), uuid="other")
    monkeypatch.setattr(gpu, "load_nvml", lambda: None)
    for watch in (other, ClockWatch(torch.device("cuda")), ClockWatch(torch.device("cpu"))):
        with watch:
            pass
        assert watch.columns(context) == {}
