"""Clocks of this rank's GPU, why they were lowered, and work on other GPUs of the host, as NVML reports them."""

import time
from collections import Counter
from typing import Any

import torch

from tpbench.measure.machine import gpu_handles, load_nvml, visible_gpus
from tpbench.measure.ranks import gather_numbers
from tpbench.measure.session import Context

THROTTLE_REASONS = ("power", "thermal", "sync_boost", "board_limit", "reliability")
"""NVML's policies. One that lowered the clocks for `THROTTLED_SHARE` of the timed iterations is a reason."""
THROTTLED_SHARE = 0.01


class ClockWatch:
    """Watches the GPUs of a host inside its `with` blocks, which enclose timed iterations and nothing else."""

    def __init__(self, device: torch.device) -> None:
        self.nvml: Any = load_nvml() if device.type == "cuda" else None
        if self.nvml is not None:
            self.handle = self._ask("DeviceGetHandleByUUID", f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        self.clocks_mhz: dict[str, Any] = {}  # at the end of the last block, if NVML knows them
        self.beside = False  # true if GPUs of this host that this process may not use had work at the end of a block
        own = {uuid for uuid, _ in visible_gpus()} if self.nvml is not None else set()
        handles = gpu_handles(self.nvml) if own and not any(uuid.startswith("MIG-") for uuid in own) else []
        self._others = [handle for handle in handles if self._ask("DeviceGetUUID", handle) not in own]
        self._watched_s = 0.0
        self._violated_ns: Counter[str] = Counter()

    def __enter__(self) -> None:
        self._began_s, self._before_ns = time.monotonic(), self._violations_ns()

    def __exit__(self, *error: object) -> None:
        self._watched_s += time.monotonic() - self._began_s
        rates = [self._ask("DeviceGetUtilizationRates", handle) for handle in self._others]
        self.beside = self.beside or any(rate is not None and rate.gpu > 0 for rate in rates)
        after_ns = self._violations_ns()
        self._violated_ns.update({reason: ns - self._before_ns.get(reason, ns) for reason, ns in after_ns.items()})
        kinds = {"sm_clock_mhz": "SM", "memory_clock_mhz": "MEM"}
        clocks = {name: self._of_gpu("ClockInfo", f"NVML_CLOCK_{kind}") for name, kind in kinds.items()}
        self.clocks_mhz = {} if None in clocks.values() else clocks

    def columns(self, context: Context) -> dict[str, Any]:
        """Return the clocks of this rank, why those of any rank were lowered, and `beside`. Collective."""
        least_ns = THROTTLED_SHARE * self._watched_s * 1e9
        applied = [self._violated_ns[reason] > least_ns for reason in THROTTLE_REASONS]
        *on_ranks, knows, beside = gather_numbers([*applied, bool(self._violated_ns), self.beside], context)
        columns = self.clocks_mhz | ({"beside": "another-sweep"} if beside.any() else {})
        if not knows.all():
            return columns
        names = [name for name, ranks in zip(THROTTLE_REASONS, on_ranks, strict=True) if ranks.any()]
        return columns | {"throttle_reasons": " ".join(names) or "none"}

    def _violations_ns(self) -> dict[str, int]:
        """Return for each reason the time in ns during which it has lowered the clocks, where NVML counts it."""
        policies = {reason: f"NVML_PERF_POLICY_{reason.upper()}" for reason in THROTTLE_REASONS}
        counts = {reason: self._of_gpu("ViolationStatus", policy) for reason, policy in policies.items()}
        return {reason: int(count.violationTime) for reason, count in counts.items() if count is not None}

    def _of_gpu(self, what: str, constant: str) -> Any:
        """Return what NVML says about this GPU, or None if it does not know it."""
        if self.nvml is None or self.handle is None:
            return None
        return self._ask(f"DeviceGet{what}", self.handle, getattr(self.nvml, constant))

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self.nvml, f"nvml{function}")(*arguments)
        except self.nvml.NVMLError:
            return None
