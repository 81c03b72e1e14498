"""NVML of a machine with one GPU, in simulated time: a stand-in for the module `pynvml`."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml

from tests.support.simulated_time import SimulatedTime
from tpbench.measure.gpu import NvmlGpu

UPDATE_S = 0.1
"""The energy counter changes this often."""

CALL_S = 0.001
"""A call of NVML takes this long."""


class FakeNvml:
    """The calls of NVML that a rank uses. A call that the GPU does not know raises NVML's error."""

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM

    def __init__(self, time: SimulatedTime, *unknown: str) -> None:
        """`unknown`: calls that the GPU does not know."""
        self.time, self.unknown = time, unknown
        self.used_j = 0.0
        """Joules that the counter shows from its next update on."""
        self.violations_ns: dict[int, int] = {}
        self._shown_j, self._updated_s = 0.0, 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(pynvml, name)  # constants

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        self._called("nvmlDeviceGetTotalEnergyConsumption")
        if self.time.now_s - self._updated_s >= UPDATE_S:
            self._shown_j, self._updated_s = self.used_j, self.time.now_s
        return round(self._shown_j * 1e3)

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
        self._called("nvmlDeviceGetClockInfo")
        clocks: dict[int, int] = {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}
        return clocks[kind]

    def nvmlDeviceGetViolationStatus(self, handle: object, policy: int) -> SimpleNamespace:
        self._called("nvmlDeviceGetViolationStatus")
        return SimpleNamespace(violationTime=self.violations_ns.get(policy, 0), referenceTime=0)

    def _called(self, name: str) -> None:
        self.time.sleep(CALL_S)
        if name in self.unknown:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def fake_gpu(time: SimulatedTime, *unknown: str) -> NvmlGpu:
    """Return a GPU of such an NVML."""
    return NvmlGpu(FakeNvml(time, *unknown), "handle")
