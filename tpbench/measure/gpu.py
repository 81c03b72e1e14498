"""Clocks and throttling of this rank's GPU and the energy of an iteration, as NVML reports them.

Without NVML nothing is known.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tpbench.measure.machine import load_nvml
from tpbench.measure.ranks import gather_number, gather_numbers
from tpbench.measure.session import Context

THROTTLE_REASONS = ("power", "thermal", "sync_boost", "board_limit", "reliability")
"""Reasons for lower clocks: in capitals, NVML's names of the policies whose violation time it counts."""

THROTTLED_SHARE = 0.01
"""A policy that lowered the clocks for at least this share of the timed iterations is a reason."""

SAMPLE_S = 1.0
"""Duration of the iterations whose energy is measured. GPUs update their counter every 20 to 100 ms."""

MOST_ITERATIONS = 10_000
"""Largest number of iterations of a sample. It bounds the sample if a variant replaced the clock."""

UPDATE_S = 0.15
"""Longest wait for an update of the counter."""


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU of NVML."""

    nvml: Any
    handle: Any

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return what a function of NVML answers about this GPU, or None if NVML does not know it."""
        try:
            return getattr(self.nvml, function)(self.handle, *arguments)
        except self.nvml.NVMLError:
            return None

    def clocks_mhz(self) -> dict[str, Any]:
        """Return the columns of the present clocks. Empty if NVML does not know them."""
        kinds = {"sm_clock_mhz": self.nvml.NVML_CLOCK_SM, "memory_clock_mhz": self.nvml.NVML_CLOCK_MEM}
        clocks = {name: self.ask("nvmlDeviceGetClockInfo", kind) for name, kind in kinds.items()}
        return {} if None in clocks.values() else clocks

    def energy_j(self) -> float | None:
        """Return the energy in J that the GPU has used since its driver was loaded, or None if it does not count."""
        used_mj = self.ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if used_mj is None else float(used_mj) / 1e3

    def violations_ns(self) -> dict[str, int]:
        """Return for each reason the time in ns during which it has lowered the clocks, where NVML counts it."""
        policies = {reason: getattr(self.nvml, f"NVML_PERF_POLICY_{reason.upper()}") for reason in THROTTLE_REASONS}
        counts = {name: self.ask("nvmlDeviceGetViolationStatus", policy) for name, policy in policies.items()}
        return {reason: int(count.violationTime) for reason, count in counts.items() if count is not None}


def this_gpu(device: torch.device) -> NvmlGpu | None:
    """Return this rank's GPU, or None on a CPU and where NVML does not know the GPU."""
    nvml = load_nvml() if device.type == "cuda" else None
    if nvml is None:
        return None
    try:
        return NvmlGpu(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
    except nvml.NVMLError:
        return None


class ClockWatch:
    """Watches a GPU's clocks inside its `with` blocks, which enclose timed iterations and nothing else."""

    def __init__(self, gpu: NvmlGpu | None, now_s: Callable[[], float] = time.monotonic) -> None:
        self.gpu, self.now_s = gpu, now_s
        self.clocks_mhz: dict[str, Any] = {}
        """Columns of the clocks at the end of the last block."""
        self._watched_s = 0.0
        self._violated_ns: Counter[str] = Counter()

    def __enter__(self) -> None:
        self._began_s = self.now_s()
        self._before_ns = self.gpu.violations_ns() if self.gpu else {}

    def __exit__(self, *error: object) -> None:
        if self.gpu is None:
            return
        self._watched_s += self.now_s() - self._began_s
        after_ns = self.gpu.violations_ns()
        self._violated_ns.update({reason: ns - self._before_ns.get(reason, ns) for reason, ns in after_ns.items()})
        self.clocks_mhz = self.gpu.clocks_mhz()

    def reasons(self) -> set[str] | None:
        """Return the names of `THROTTLE_REASONS` that applied, or None if NVML counts none of them.

        A reason applied if its violation time grew by `THROTTLED_SHARE` of the watched time.
        """
        least_ns = THROTTLED_SHARE * self._watched_s * 1e9
        return {reason for reason, ns in self._violated_ns.items() if ns > least_ns} if self._violated_ns else None

    def columns(self, context: Context) -> dict[str, Any]:
        """Return the clocks of this rank after the timed iterations, and why those of any rank were lowered.

        Collective.
        """
        if context.device.type != "cuda":
            return {}
        reasons = self.reasons()
        applied = [math.nan if reasons is None else float(name in reasons) for name in THROTTLE_REASONS]
        on_ranks = np.max(gather_numbers(applied, context), axis=1)  # NaN if a rank does not know
        if np.isnan(on_ranks).any():
            return self.clocks_mhz
        names = [name for name, applies in zip(THROTTLE_REASONS, on_ranks, strict=True) if applies]
        return self.clocks_mhz | {"throttle_reasons": " ".join(names) or "none"}


def iteration_energy_j(
    iteration: Callable[[], None], time_ms: float, gpu: NvmlGpu | None, context: Context, sample_s: float = SAMPLE_S
) -> float | None:
    """Return the energy of an iteration in J, summed over ranks, or None if a rank's GPU does not count it. Collective.

    Iterations of `time_ms` by wall clock run for at least `sample_s`, queued one after the other. The counter is read
    when it has just changed.
    """
    counts_energy = gpu is not None and gpu.energy_j() is not None
    if gpu is None or min(gather_number(counts_energy, context)) == 0:
        return None
    iterations = max(1, math.ceil(min(MOST_ITERATIONS, sample_s / time_ms * 1e3)))
    dist.barrier()
    before_j = _updated_j(gpu)
    for _ in range(iterations):
        iteration()
    torch.cuda.synchronize(context.device)
    energy_j = sum(gather_number((_updated_j(gpu) - before_j) / iterations, context))
    return energy_j if math.isfinite(energy_j) else None


def _updated_j(gpu: NvmlGpu) -> float:
    """Return the counter right after it changes, or after `UPDATE_S`."""
    first_j = now_j = gpu.energy_j()
    deadline_s = time.monotonic() + UPDATE_S
    while now_j == first_j and time.monotonic() < deadline_s:
        now_j = gpu.energy_j()
    return now_j if now_j is not None else math.nan
