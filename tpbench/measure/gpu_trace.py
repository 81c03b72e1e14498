"""Traces of a GPU by torch's profiler, and the shares of an iteration in which it computes, communicates and idles.

The trace runs after the timed iterations. It needs CUPTI, which stays attached and slows later launches of the process
down by 10 to 20% (pytorch/pytorch#146604); detached, it can crash together with CUDA graphs (pytorch/pytorch#144455).
So a process that has profiled a GPU runs no further job, and a process that runs further jobs is not traced. Without a
trace both clocks tell a part.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from tpbench.measure.ranks import gather_numbers
from tpbench.measure.session import Context, Session
from tpbench.measure.statistics import is_host_bound
from tpbench.measure.timers import WallTimer, synchronize

has_run = False
"""True if this process has profiled a GPU."""

TRACES = "trace_rank*.json.gz"
"""Names of the files that `keep_trace` writes."""

_COMMUNICATION = re.compile(r"nccl|memcpy ptop|symm_mem|symmetric_memory|barrier_kernel|push_kernel", re.IGNORECASE)
_MARKER = "spin_kernel"
"""Kernel of torch.cuda._sleep. One runs before and one after each traced iteration."""
_LABEL = re.compile(rf"^(nccl:|FSDP::|## |ProfilerStep)|{_MARKER}")
"""Named ranges that the device's timeline also shows, and markers: no work of the step."""

TRACED_ITERATIONS, TRACED_S = 3, 1.0
"""Iterations that take longer than so many seconds together are traced once."""

MOST_IDLE_OF_REPLAY = 0.5
"""Idle share above which the trace of a long CUDA graph is incomplete, as seen on two H200s with torch 2.11."""


class Event(NamedTuple):
    """A kernel, a copy or a marker on the GPU."""

    name: str
    start_ns: int
    length_ns: int
    stream: int


def keep_trace(step: Callable[[], None], context: Context) -> None:
    """Run a step under the profiler of CPU and GPU. Write this rank's Chrome trace beside the job's logs."""
    global has_run
    on_gpu = context.device.type == "cuda"
    has_run = has_run or on_gpu
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
        step()
        synchronize(context.device)
    profiler.export_chrome_trace(str(context.folder / TRACES.replace("*", str(context.rank))))


def busy_ms(events: Iterable[Event]) -> tuple[float, float]:
    """Return the time in ms in which work other than communication runs, and in which only communication does."""
    work = [event for event in events if not _LABEL.search(event.name)]
    # A stream with nothing but copies counts as communication: a copy from a peer's memory may have any name.
    computing = {event.stream for event in work if not event.name.startswith("Memcpy")}
    other = [event for event in work if event.stream in computing and not _COMMUNICATION.search(event.name)]
    other_ms = _covered_ms(other)
    return other_ms, _covered_ms(work) - other_ms


def _covered_ms(events: Iterable[Event]) -> float:
    """Return the time in ms in which at least one of the events runs."""
    covered = reached = 0
    for event in sorted(events, key=lambda event: event.start_ns):
        end = event.start_ns + event.length_ns
        covered += max(0, end - max(event.start_ns, reached))
        reached = max(reached, end)
    return covered / 1e6


def bottleneck_columns(
    step: Callable[[], None], session: Session, wall: WallTimer, context: Context, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the columns of the bottleneck of an iteration on GPUs: from a trace, else from both clocks. Collective.

    The clocks tell the idle share, and whether the host bounds the iteration. They tell all if the variant communicates
    only inside kernels that also compute, and nothing of a schedule, whose device time contains gaps between launches.
    """
    schedule, costs = session.schedule, session.costs
    if not context.process_stays:
        if busy := _busy_by_trace(step, session.restore, wall, context, columns["time_ms"]):
            shares = share_columns(*busy, columns, costs.compute_ms)
            if not (schedule and context.graph and shares["idle_share"] > MOST_IDLE_OF_REPLAY):
                return shares
            context.say(f"no shares: the trace has little of a replay (idle for {shares['idle_share']:.0%} of it)")
    if schedule is not None:
        return {}
    shares = share_columns(columns["device_ms"], 0.0, columns, costs.compute_ms)
    if costs.communicates_in_kernels or not costs.bytes_communicated:
        return shares
    return {name: shares[name] for name in ("idle_share", "bound") if name != "bound" or shares["bound"] == "host"}


def _busy_by_trace(
    step: Callable[[], None], restore: Callable[[], None], wall: WallTimer, context: Context, time_ms: float
) -> tuple[float, float] | None:
    """Return the medians of `busy_ms` on the rank that communicates, so waits, least. None without CUPTI."""
    iterations = TRACED_ITERATIONS if time_ms * TRACED_ITERATIONS <= TRACED_S * 1e3 else 1
    busy = [busy_ms(iteration) for iteration in _traced(step, restore, wall, iterations, context)]
    here = [median(times) for times in zip(*busy, strict=True)] or [np.nan, np.nan]
    computing, communicating = gather_numbers(here, context)
    if np.isnan(computing).any():
        return None
    rank = int(communicating.argmin())
    return float(computing[rank]), float(communicating[rank])


def share_columns(
    busy_compute_ms: float, communication_ms: float, columns: Mapping[str, Any], compute_ms: float
) -> dict[str, Any]:
    """Return the shares of an iteration of `time_ms` by wall clock, which add up to 1, and what bounds it.

    Without much idle time or communication, the longer time decides: that of the FLOPs, `compute_ms`, or of the memory
    traffic. Tracing slows the host down, but not the kernels, so the wall time is that of the timed iterations.
    """
    traced_ms = busy_compute_ms + communication_ms
    whole_ms = max(columns["time_ms"], traced_ms)
    compute, communication = busy_compute_ms / whole_ms, communication_ms / whole_ms
    idle = (whole_ms - traced_ms) / whole_ms
    memory_ms = columns.get("bytes_moved", 0) / columns["copy_gb_per_s"] / 1e6
    longer = "compute" if compute_ms > memory_ms else "memory"
    bound = "host" if is_host_bound(idle) else "wire" if communication > compute else longer
    return {"compute_share": compute, "communication_share": communication, "idle_share": idle, "bound": bound}


def _traced(
    step: Callable[[], None], restore: Callable[[], None], wall: WallTimer, iterations: int, context: Context
) -> list[list[Event]]:
    """Run iterations as the wall clock does, under the profiler, and return the device's events of each."""

    def marked_step() -> None:
        torch.cuda._sleep(1)
        step()
        torch.cuda.synchronize(context.device)
        torch.cuda._sleep(1)

    global has_run
    has_run = True
    # torch.profiler.profile would import torch's compiler, which takes 2 s. A rank whose profiler fails runs its
    # iterations all the same, because the other ranks run theirs with it.
    profiler: Any = None
    failure: Exception | None = None
    try:
        profiler = torch.autograd.profiler.profile(use_cpu=False, use_kineto=True, use_device="cuda")
        profiler.__enter__()
    except (RuntimeError, AssertionError) as error:
        failure = error
    wall.samples(marked_step, restore, iterations)
    try:
        if failure is not None:
            raise failure
        profiler.__exit__(None, None, None)
        return list(between_markers(_events(profiler)))
    except (RuntimeError, AssertionError, AttributeError) as error:
        context.say(f"no trace: {type(error).__name__}: {error}")
        return []


def _events(profiler: Any) -> list[Event]:
    """Return each event on the GPU. Annotations are ranges of other work."""
    return [
        Event(event.name(), event.start_ns(), event.duration_ns(), event.device_resource_id())
        for event in profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]


def between_markers(traced: Sequence[Event]) -> Iterator[list[Event]]:
    """Yield the events of each iteration: those between its two markers. Flushes and barriers lie outside."""
    markers = sorted(event.start_ns for event in traced if _MARKER in event.name)
    for begin, end in zip(markers[::2], markers[1::2], strict=False):
        yield [event for event in traced if begin < event.start_ns < end]
