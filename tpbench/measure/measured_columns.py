"""The columns of a row that a measurement fills. Those about the GPUs of a cell are missing on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpbench.measure import gpu_profiler
from tpbench.measure.bottleneck import bottleneck_columns, columns_by_clocks
from tpbench.measure.clock import WallClock
from tpbench.measure.gpu import SAMPLE_S, THROTTLE_REASONS, ClockWatch, NvmlGpu, iteration_energy_j
from tpbench.measure.rank_memory import IterationMemory
from tpbench.measure.ranks import gather_number, gather_numbers
from tpbench.measure.session import Context, Costs, DetailedSession, ScheduledSession, Session
from tpbench.measure.statistics import summary

Samples = Sequence[np.ndarray[Any, Any]]
"""Per iteration the time on every rank in ms, (world_size,)."""

NOT_THROTTLED = "none"
"""Value of the column `throttle_reasons` if the clocks of no rank were lowered."""

MOST_IDLE_OF_REPLAY = 0.5
"""Idle share above which the trace of a long CUDA graph is incomplete: its kernels follow each other without the host.
Seen on two H200s with the copies of `fsdp_dtensor_async`, torch 2.11."""


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
    say: Callable[[str], None],
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
        say("timing details")
        columns |= session.details(columns)
    return columns


def _clock_columns(samples: Samples, prefix: str, samples_column: str) -> dict[str, Any]:
    slowest = [float(ranks.max()) for ranks in samples]
    return {**summary(slowest, prefix), samples_column: slowest}


def clock_columns(watch: ClockWatch, context: Context) -> dict[str, Any]:
    """Return the clocks of rank 0 after the timed iterations, and why those of any rank were lowered. Collective."""
    if context.device.type != "cuda":
        return {}
    reasons = watch.reasons()
    bits = -1 if reasons is None else sum(1 << at for at, name in enumerate(THROTTLE_REASONS) if name in reasons)
    on_ranks = [int(number) for number in gather_number(bits, context)]
    if min(on_ranks) < 0:
        return watch.clocks_mhz
    names = [name for at, name in enumerate(THROTTLE_REASONS) if any(bits >> at & 1 for bits in on_ranks)]
    return watch.clocks_mhz | {"throttle_reasons": " ".join(names) or NOT_THROTTLED}


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
    say: Callable[[str], None],
    energy_s: float = SAMPLE_S,
) -> dict[str, Any]:
    """Return the bottleneck and the energy of an iteration, from further iterations. Collective.

    `step`: one iteration as it was timed. `columns`: those of the timed iterations. `energy_s`: duration of the
    iterations whose energy is measured.
    """
    if context.device.type != "cuda":
        return {}
    say("tracing")
    # A profiled process ends after its job. A schedule is traced all the same: nothing else shows its gaps, and a new
    # process costs little beside it. So is a process that the workload has profiled already. All ranks decide alike.
    may_trace = not context.process_stays or (isinstance(session, ScheduledSession) and session.schedule.traced)
    may_trace = may_trace or max(gather_number(gpu_profiler.has_run(), context)) > 0
    compute_ms = session.costs.compute_ms
    result = bottleneck_columns(step, session.restore, wall, context, columns, compute_ms) if may_trace else {}
    if context.graph and isinstance(session, ScheduledSession) and result.get("idle_share", 0.0) > MOST_IDLE_OF_REPLAY:
        say(f"no shares: the trace has little of a replay (idle for {result['idle_share']:.0%} of it)")
        result = {}
    result = result or columns_by_clocks(session, columns)
    say("measuring energy")

    def prepare() -> None:
        session.restore()
        wall.line_up()

    energy_j = iteration_energy_j(step, prepare, columns["time_ms"], gpu, context, energy_s)
    return result if energy_j is None else {**result, "energy_j": energy_j}
