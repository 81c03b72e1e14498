"""The columns of a row that a measurement fills. Those about the GPUs of a cell are missing on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tpbench.measure.clock import WallClock
from tpbench.measure.gpu import SAMPLE_S, NvmlGpu, iteration_energy_j
from tpbench.measure.gpu_trace import bottleneck_columns
from tpbench.measure.rank_memory import IterationMemory
from tpbench.measure.ranks import gather_number, gather_numbers
from tpbench.measure.session import Context, Costs, DetailedSession, Session
from tpbench.measure.statistics import Samples, summary


def memory_columns(peak_gib: float, context: Context) -> dict[str, Any]:
    """Return the peak memory of every rank. Collective."""
    peaks = gather_number(peak_gib, context)
    return {"rank_peak_gib": peaks, "peak_gib": max(peaks)}


def iteration_memory_columns(usage: IterationMemory, context: Context) -> dict[str, Any]:
    """Return the memory of each iteration on the rank that has most. Collective."""
    held, peaks = (gather_numbers(gib, context) for gib in (usage.held_gib, usage.peak_gib))
    return {
        "iteration_held_gib": [float(ranks.max()) for ranks in held],
        "iteration_peak_gib": [float(ranks.max()) for ranks in peaks],
    }


def cost_columns(costs: Costs, copy_gb_per_s: float) -> dict[str, Any]:
    """Return the unavoidable costs of an iteration and their time on this machine, the floor.

    floor_ms = max(bytes_moved / copy_gb_per_s + wire_ms, compute_ms): memory traffic and communication, or products.
    If they can only run one after the other, it is their sum. With `wire_beside_memory` the longer of memory traffic
    and communication counts, not both. Without counted bytes there is no floor.
    """
    columns = {"bytes_communicated": costs.bytes_communicated, "copy_gb_per_s": copy_gb_per_s}
    if costs.bytes_moved is None:
        return columns
    moving_ms = costs.bytes_moved / copy_gb_per_s / 1e6
    memory_ms = max(moving_ms, costs.wire_ms) if costs.wire_beside_memory else moving_ms + costs.wire_ms
    return columns | {
        "bytes_moved": costs.bytes_moved,
        "flops": costs.flops,
        "floor_ms": memory_ms + costs.compute_ms if costs.consecutive else max(memory_ms, costs.compute_ms),
    }


def time_columns(
    session: object,
    context: Context,
    wall: Samples,
    on_device: Samples | None,
    launches: Samples | None,
    columns: dict[str, Any],
) -> dict[str, Any]:
    """Return `columns` (those so far) with the times, the fraction of the floor and the session's details.

    time_ms, device_ms and launch_ms are medians over iterations of the maximum over ranks. A CPU has neither device
    samples (`on_device`) nor launches. The fraction of the floor and the bandwidth use device_ms where there are device
    samples, else time_ms. Collective if the session has details.
    """
    columns = columns | _clock_columns(wall, "time", "samples_ms")
    columns["iterations"] = len(wall)
    columns["skew_ms"] = float(np.median([ranks.max() - ranks.min() for ranks in wall]))
    best_ms = columns["time_ms"]
    if on_device is not None:
        columns |= _clock_columns(on_device, "device", "device_samples_ms")
        best_ms = columns["device_ms"]
    if launches is not None:
        columns["launch_ms"] = float(np.median([ranks.max() for ranks in launches]))
    if "floor_ms" in columns:
        columns["fraction_of_floor"] = columns["floor_ms"] / best_ms
        columns["gb_per_s"] = columns["bytes_moved"] / best_ms / 1e6
    if isinstance(session, DetailedSession):
        context.say("timing details")
        columns |= session.details(columns)
    return columns


def _clock_columns(samples: Samples, prefix: str, samples_column: str) -> dict[str, Any]:
    slowest = [float(ranks.max()) for ranks in samples]
    return {**summary(slowest, prefix), samples_column: slowest}


def launch_samples(wall: WallClock, iterations: int, context: Context) -> Samples | None:
    """Return the host time in ms of the last iterations, from the call of the step until it returned. Collective.

    The time includes waits for the device within the step. With a CUDA graph the step is its replay. The result is None
    on a CPU: there the call itself computes, so that its time is not one of launches.
    """
    return gather_numbers(wall.launches_ms[-iterations:], context) if context.device.type == "cuda" else None


def iteration_columns(
    step: Callable[[], None],
    session: Session,
    wall: WallClock,
    gpu: NvmlGpu | None,
    context: Context,
    columns: dict[str, Any],
    energy_s: float = SAMPLE_S,
) -> dict[str, Any]:
    """Return the bottleneck and the energy of an iteration, from further iterations. Collective.

    `step`: one iteration as it was timed. `columns`: those of the timed iterations. `energy_s`: duration of the
    iterations whose energy is measured.
    """
    if context.device.type != "cuda":
        return {}
    context.say("tracing")
    result = bottleneck_columns(step, session, wall, context, columns)
    context.say("measuring energy")

    def iteration() -> None:
        session.restore()
        wall.line_up()
        step()

    energy_j = iteration_energy_j(iteration, columns["time_ms"], gpu, context, energy_s)
    return result if energy_j is None else {**result, "energy_j": energy_j}
