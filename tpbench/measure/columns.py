"""What a measurement comes to in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tpbench.measure.machine import nvml_session
from tpbench.measure.ranks import of_all
from tpbench.measure.session import Context, Costs, Detailed
from tpbench.measure.statistics import summary

Samples = Sequence[np.ndarray[Any, Any]]
"""Each iteration's time on every rank, in ms."""


def memory_columns(peak_gib: float, context: Context) -> dict[str, Any]:
    """The peak of every rank. Collective."""
    peaks = of_all(peak_gib, context)
    return {"rank_peak_gib": peaks, "peak_gib": max(peaks)}


def cost_columns(costs: Costs, copy_gb_per_s: float) -> dict[str, Any]:
    """What an iteration cannot avoid, and the time that takes on this machine."""
    return {
        "bytes_moved": costs.bytes_moved,
        "bytes_communicated": costs.bytes_communicated,
        "flops": costs.flops,
        "copy_gb_per_s": copy_gb_per_s,
        "floor_ms": max(costs.bytes_moved / copy_gb_per_s / 1e6 + costs.wire_ms, costs.compute_ms),
    }


def time_columns(
    session: object,
    context: Context,
    wall: Samples,
    on_device: Samples | None,
    costs: dict[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The times (`on_device`: where there are events), what share of the floor they reach, and the session's details.

    `costs`: the columns so far. Collective where the session is `Detailed`.
    """
    columns = costs | _clock_columns(wall, "time", "samples_ms")
    columns["iterations"] = len(wall)
    columns["skew_ms"] = float(np.median([each.max() - each.min() for each in wall]))
    best_ms = columns["time_ms"]
    if on_device is not None:
        columns |= _clock_columns(on_device, "device", "device_samples_ms")
        columns |= _clocks_mhz(context.device)
        best_ms = columns["device_ms"]
    columns["fraction_of_floor"] = columns["floor_ms"] / best_ms
    columns["gb_per_s"] = columns["bytes_moved"] / best_ms / 1e6
    if isinstance(session, Detailed):
        say("timing details")
        columns |= session.details(columns)
    return columns


def _clock_columns(samples: Samples, prefix: str, raw: str) -> dict[str, Any]:
    slowest = [float(each.max()) for each in samples]
    return {**summary(slowest, prefix), raw: slowest}


def _clocks_mhz(device: torch.device) -> dict[str, Any]:
    """The clocks right after the timing, while they are still what they were."""
    with nvml_session() as nvml:
        if nvml is None:
            return {}
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            return {
                "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                "memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            }
        except nvml.NVMLError:
            return {}
