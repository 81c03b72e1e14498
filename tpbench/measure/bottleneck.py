"""The bottleneck of an iteration: the shares of computing, communicating and idling devices, from a short trace.

The trace runs after the timed iterations and does not touch them. It needs CUPTI. The profiler would slow later jobs of
the process down, so a process that runs further jobs is not traced. Exceptions, after which the process ends, are a
schedule of iterations and a workload that profiles anyway. A workload that times its exposed communication has the
shares from that and from both clocks. A CPU has no shares.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from tpbench.measure import gpu_profiler
from tpbench.measure.clock import WallClock
from tpbench.measure.gpu_profiler import COMMUNICATION, Event, Interval, covered_ms, events, intervals
from tpbench.measure.ranks import gather_numbers
from tpbench.measure.session import Context, ScheduledSession, Session
from tpbench.measure.statistics import is_host_bound

TRACED_ITERATIONS = 3
TRACED_S = 1.0
"""Iterations that take longer than this together are traced once."""

_MARKER = "spin_kernel"
"""Kernel of torch.cuda._sleep. One runs before and one after each traced iteration."""


@dataclass(frozen=True)
class Shares:
    """Shares of an iteration, by what the device does. The three shares add up to 1."""

    compute: float
    """Share in which a kernel or copy runs that computes, even if it also communicates."""
    communication: float
    """Share in which only communication runs: NCCL kernels, copies between GPUs, and kernels that write to peers or
    wait for them."""
    idle: float
    """Share in which nothing runs."""

    @classmethod
    def of(cls, compute_ms: float, communication_ms: float, time_ms: float) -> Shares:
        """Return the shares of an iteration of `time_ms` by wall clock. Traced times beyond it leave no idle time."""
        whole_ms = max(time_ms, compute_ms + communication_ms)
        busy = compute_ms / whole_ms, communication_ms / whole_ms
        return cls(*busy, max(0.0, 1 - sum(busy)))

    def bound(self, compute_ms: float, memory_ms: float) -> str:
        """Return what bounds the iteration: host, wire, compute or memory.

        The host bounds it if the idle share is above `host_bound.IDLE_SHARE`. Else the wire bounds it if the
        communication share is above the compute share. Else the longer of two roofline times decides: that of the
        FLOPs, `compute_ms`, or that of the memory traffic, `memory_ms`.
        """
        if is_host_bound(self.idle):
            return "host"
        if self.communication > self.compute:
            return "wire"
        return "compute" if compute_ms > memory_ms else "memory"


def bottleneck_columns(
    step: Callable[[], None],
    restore: Callable[[], None],
    wall: WallClock,
    context: Context,
    columns: dict[str, Any],
    compute_ms: float,
) -> dict[str, Any]:
    """Trace a few iterations and return the columns of their bottleneck. Empty on a CPU or without CUPTI. Collective.

    The busy times are medians over the traced iterations. The idle time is the rest of `time_ms`, the wall time of the
    timed iterations: tracing slows the host down, but not the kernels. The shares are those of the rank that
    communicates least, because the other ranks wait for it.
    """
    if context.device.type != "cuda":
        return {}
    iterations = TRACED_ITERATIONS if columns["time_ms"] * TRACED_ITERATIONS <= TRACED_S * 1e3 else 1
    traced = _traced(step, restore, wall, iterations, context)
    busy = [busy_ms(intervals(iteration, on_gpu=True)) for iteration in traced]
    here = [median(times) for times in zip(*busy, strict=True)] or [np.nan, np.nan]
    computing, communicating = gather_numbers(here, context)
    if np.isnan(computing).any():
        return {}
    rank = int(communicating.argmin())
    shares = Shares.of(float(computing[rank]), float(communicating[rank]), columns["time_ms"])
    return _all_columns(shares, columns, compute_ms)


def columns_by_exposure(exposed_ms: float, columns: Mapping[str, Any], compute_ms: float) -> dict[str, Any]:
    """Return the same columns without a trace, from the two clocks.

    `exposed_ms`: the part of the device time that the iteration takes longer than without communication.
    """
    communication_ms = min(max(exposed_ms, 0.0), columns["device_ms"])
    shares = Shares.of(columns["device_ms"] - communication_ms, communication_ms, columns["time_ms"])
    return _all_columns(shares, columns, compute_ms)


def columns_by_clocks(session: Session, columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of the bottleneck that follow from the wall time and the device time alone.

    These are all columns if the variant does not communicate, or only inside kernels that also compute. Otherwise it is
    the idle share, and `bound` if the host bounds the iteration. A schedule has none of them: its device time contains
    the gaps between launches.
    """
    if isinstance(session, ScheduledSession):
        return {}
    shares, costs = Shares.of(columns["device_ms"], 0.0, columns["time_ms"]), session.costs
    if costs.communicates_in_kernels or not costs.bytes_communicated:
        return _all_columns(shares, columns, costs.compute_ms)
    return {"idle_share": shares.idle, **({"bound": "host"} if is_host_bound(shares.idle) else {})}


def _all_columns(shares: Shares, columns: Mapping[str, Any], compute_ms: float) -> dict[str, Any]:
    return {
        "compute_share": shares.compute,
        "communication_share": shares.communication,
        "idle_share": shares.idle,
        "bound": shares.bound(compute_ms, _memory_ms(columns)),
    }


def _memory_ms(columns: Mapping[str, Any]) -> float:
    return float(columns.get("bytes_moved", 0) / columns["copy_gb_per_s"] / 1e6)


def busy_ms(timeline: Sequence[Interval]) -> tuple[float, float]:
    """Return the time in ms in which work other than communication runs, and in which only communication does."""
    computing = covered_ms(interval for interval in timeline if interval.kind != COMMUNICATION)
    return computing, covered_ms(timeline) - computing


def _traced(
    step: Callable[[], None], restore: Callable[[], None], wall: WallClock, iterations: int, context: Context
) -> list[list[Event]]:
    """Run iterations as the wall clock does, under the profiler, and return the device's events of each."""

    def marked_step() -> None:
        torch.cuda._sleep(1)
        step()
        torch.cuda.synchronize(context.device)
        torch.cuda._sleep(1)

    # A rank whose profiler fails runs its iterations all the same, because the other ranks run theirs with it.
    profiler = gpu_profiler.gpu_profile()
    with contextlib.suppress(RuntimeError, AssertionError):
        profiler.start()
    wall.samples(marked_step, restore, iterations)
    try:
        profiler.stop()
        return list(between_markers(events(profiler, on_gpu=True)))
    except (RuntimeError, AssertionError, AttributeError) as error:
        context.say(f"no trace: {type(error).__name__}: {error}")
        return []


def between_markers(traced: Sequence[Event]) -> Iterator[list[Event]]:
    """Yield the events of each iteration: those between its two markers. Flushes and barriers lie outside."""
    markers = sorted(start for name, start, _, _ in traced if _MARKER in name)
    for begin, end in zip(markers[::2], markers[1::2], strict=False):
        yield [event for event in traced if begin < event[1] < end]
