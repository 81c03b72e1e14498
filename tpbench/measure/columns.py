"""The columns of a row that a measurement fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpbench.measure.memory import IterationMemory
from tpbench.measure.ranks import gather_number, gather_numbers
from tpbench.measure.session import Context, Costs, DetailedSession
from tpbench.measure.statistics import summary

Samples = Sequence[np.ndarray[Any, Any]]
"""Per iteration the time on every rank in ms, (world_size,)."""


def memory_columns(peak_gib: float, context: Context) -> dict[str, Any]:
    """Return the peak memory of every rank. Collective."""
    peaks = gather_number(peak_gib, context)
    return {"rank_peak_gib": peaks, "peak_gib": max(peaks)}


def iteration_memory_columns(usage: IterationMemory, context: Context) -> dict[str, Any]:
    """Return the memory of each iteration on the rank that has most. Collective."""
    held, peaks = (gather_numbers(gib, context) for gib in (usage.held_gib, usage.peak_gib))
    return {
        "iteration_held_gib": [float(each.max()) for each in held],
        "iteration_peak_gib": [float(each.max()) for each in peaks],
    }


def cost_columns(costs: Costs, copy_gb_per_s: float) -> dict[str, Any]:
    """Return the unavoidable costs of an iteration and their time on this machine, the floor.

    floor_ms = max(bytes_moved / copy_gb_per_s + wire_ms, compute_ms): memory traffic and communication, or products.
    If they can only run one after the other, it is their sum. With `wire_beside_memory` the longer of memory traffic
    and communication counts, not both.
    """
    moving_ms = costs.bytes_moved / copy_gb_per_s / 1e6
    memory_ms = max(moving_ms, costs.wire_ms) if costs.wire_beside_memory else moving_ms + costs.wire_ms
    return {
        "bytes_moved": costs.bytes_moved,
        "bytes_communicated": costs.bytes_communicated,
        "flops": costs.flops,
        "copy_gb_per_s": copy_gb_per_s,
        "floor_ms": memory_ms + costs.compute_ms if costs.consecutive else max(memory_ms, costs.compute_ms),
    }


def time_columns(
    session: object,
    context: Context,
    wall: Samples,
    on_device: Samples | None,
    launches: Samples | None,
    columns: dict[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return `columns` (those so far) with the times, the fraction of the floor and the session's details.

    time_ms, device_ms and launch_ms are medians over iterations of the maximum over ranks. A CPU has neither device
    samples (`on_device`) nor launches. The fraction of the floor and the bandwidth use device_ms where there are device
    samples, else time_ms. Collective if the session has details.
    """
    columns = columns | _clock_columns(wall, "time", "samples_ms")
    columns["iterations"] = len(wall)
    columns["skew_ms"] = float(np.median([each.max() - each.min() for each in wall]))
    best_ms = columns["time_ms"]
    if on_device is not None:
        columns |= _clock_columns(on_device, "device", "device_samples_ms")
        best_ms = columns["device_ms"]
    if launches is not None:
        columns["launch_ms"] = float(np.median([each.max() for each in launches]))
    columns["fraction_of_floor"] = columns["floor_ms"] / best_ms
    columns["gb_per_s"] = columns["bytes_moved"] / best_ms / 1e6
    if isinstance(session, DetailedSession):
        say("timing details")
        columns |= session.details(columns)
    return columns


def _clock_columns(samples: Samples, prefix: str, samples_column: str) -> dict[str, Any]:
    slowest = [float(each.max()) for each in samples]
    return {**summary(slowest, prefix), samples_column: slowest}
