"""The bottleneck of an iteration: the shares of computing, communicating and idling devices, from a short trace.

The trace runs after the timed iterations and does not touch them. It needs CUPTI. The profiler would slow later jobs of
the process down, so a process that runs further jobs is not traced. Exceptions, after which the process ends, are a
schedule of iterations and a workload that profiles anyway. Without a trace both clocks tell a part. A CPU has no
shares.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from tpbench.measure import gpu_profiler
from tpbench.measure.clock import WallClock
from tpbench.measure.gpu_profiler import Event, busy_ms, events, intervals
from tpbench.measure.ranks import gather_number, gather_numbers
from tpbench.measure.session import Context, ScheduledSession, Session
from tpbench.measure.statistics import is_host_bound

TRACED_ITERATIONS = 3
TRACED_S = 1.0
"""Iterations that take longer than this together are traced once."""

MOST_IDLE_OF_REPLAY = 0.5
"""Idle share above which the trace of a long CUDA graph is incomplete: its kernels follow each other without the host.
Seen on two H200s with the copies of `fsdp_dtensor_async`, torch 2.11."""

_MARKER = "spin_kernel"
"""Kernel of torch.cuda._sleep. One runs before and one after each traced iteration."""


def bottleneck_columns(
    step: Callable[[], None], session: Session, wall: WallClock, context: Context, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the columns of the bottleneck of an iteration on GPUs: from a trace, else from both clocks. Collective.

    `step`: one iteration as it was timed. `columns`: those of the timed iterations.
    """
    # A schedule is traced in any process: nothing else shows its gaps, and a new process costs little beside it. So is
    # a process that the workload has profiled already. All ranks decide alike.
    may_trace = not context.process_stays or (isinstance(session, ScheduledSession) and session.schedule.traced)
    may_trace = may_trace or max(gather_number(gpu_profiler.has_run(), context)) > 0
    result = _columns_by_trace(step, session, wall, context, columns) if may_trace else {}
    if context.graph and isinstance(session, ScheduledSession) and result.get("idle_share", 0.0) > MOST_IDLE_OF_REPLAY:
        context.say(f"no shares: the trace has little of a replay (idle for {result['idle_share']:.0%} of it)")
        result = {}
    return result or _columns_by_clocks(session, columns)


def _columns_by_trace(
    step: Callable[[], None], session: Session, wall: WallClock, context: Context, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Trace a few iterations. Return nothing without CUPTI.

    The busy times are medians over the traced iterations. The idle time is the rest of `time_ms`, the wall time of the
    timed iterations: tracing slows the host down, but not the kernels. The shares are those of the rank that
    communicates least, because the other ranks wait for it.
    """
    iterations = TRACED_ITERATIONS if columns["time_ms"] * TRACED_ITERATIONS <= TRACED_S * 1e3 else 1
    traced = _traced(step, session.restore, wall, iterations, context)
    busy = [busy_ms(intervals(iteration)) for iteration in traced]
    here = [median(times) for times in zip(*busy, strict=True)] or [np.nan, np.nan]
    computing, communicating = gather_numbers(here, context)
    if np.isnan(computing).any():
        return {}
    rank = int(communicating.argmin())
    return share_columns(float(computing[rank]), float(communicating[rank]), columns, session.costs.compute_ms)


def _columns_by_clocks(session: Session, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that follow from the wall time and the device time alone.

    These are all columns if the variant does not communicate, or only inside kernels that also compute. Otherwise it is
    the idle share, and `bound` if the host bounds the iteration. A schedule has none of them: its device time contains
    the gaps between launches.
    """
    if isinstance(session, ScheduledSession):
        return {}
    costs = session.costs
    result = share_columns(columns["device_ms"], 0.0, columns, costs.compute_ms)
    if costs.communicates_in_kernels or not costs.bytes_communicated:
        return result
    return {name: result[name] for name in ("idle_share", "bound") if name != "bound" or result["bound"] == "host"}


def share_columns(
    busy_compute_ms: float, communication_ms: float, columns: Mapping[str, Any], compute_ms: float
) -> dict[str, Any]:
    """Return the shares of an iteration of `time_ms` by wall clock, which add up to 1, and what bounds it.

    Busy times beyond the wall time leave no idle time. The host bounds the iteration if the device is idle too long
    (`statistics.IDLE_SHARE`). Else the wire does if more time is communication than computing. Else the longer of two
    roofline times decides: that of the FLOPs, `compute_ms`, or that of the memory traffic.
    """
    whole_ms = max(columns["time_ms"], busy_compute_ms + communication_ms)
    compute, communication = busy_compute_ms / whole_ms, communication_ms / whole_ms
    idle = max(0.0, 1 - compute - communication)
    memory_ms = columns["bytes_moved"] / columns["copy_gb_per_s"] / 1e6
    bound = "compute" if compute_ms > memory_ms else "memory"
    if communication > compute:
        bound = "wire"
    if is_host_bound(idle):
        bound = "host"
    return {"compute_share": compute, "communication_share": communication, "idle_share": idle, "bound": bound}


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
        return list(between_markers(events(profiler)))
    except (RuntimeError, AssertionError, AttributeError) as error:
        context.say(f"no trace: {type(error).__name__}: {error}")
        return []


def between_markers(traced: Sequence[Event]) -> Iterator[list[Event]]:
    """Yield the events of each iteration: those between its two markers. Flushes and barriers lie outside."""
    markers = sorted(event.start_ns for event in traced if _MARKER in event.name)
    for begin, end in zip(markers[::2], markers[1::2], strict=False):
        yield [event for event in traced if begin < event.start_ns < end]
