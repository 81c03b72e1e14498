"""NVML of a machine with one GPU, in simulated time: a stand-in for the module `pynvml`."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest
import torch

from tests.support.simulated_time import SimulatedTime
from tpbench.measure import gpu
from tpbench.measure.gpu import ClockWatch


class FakeNvml:
    """The calls of NVML that a rank uses. A call that the GPU does not know raises NVML's error."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *unknown: str) -> None:
        """`unknown`: calls that the GPU does not know."""
        self.unknown = unknown
        self.violations_ns: dict[int, int] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(pynvml, name)  # constants

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-abc":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

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
    monkeypatch.setattr(gpu, "time", time)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    return ClockWatch(torch.device("cuda")), nvml
