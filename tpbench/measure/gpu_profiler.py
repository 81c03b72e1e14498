"""torch's profiler, and the intervals of a step on a GPU: when products, communication and other work ran.

The profiler of a GPU slows later launches of its process down, because CUPTI stays attached. pytorch/pytorch#146604
reports steps that are 10 to 20% slower after a profile. Detaching CUPTI is no way out: it can crash together with CUDA
graphs (pytorch/pytorch#144455). So a process that has profiled a GPU runs no further job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tpbench.measure.session import Context

_has_run = False

PRODUCT, COMMUNICATION, OTHER = range(3)

_COMMUNICATION = re.compile(r"nccl|memcpy ptop|symm_mem|symmetric_memory|barrier_kernel|push_kernel", re.IGNORECASE)
"""Kernels of collectives, copies between GPUs by their copy engines, kernels that write to peers or wait for them."""
_LABEL = re.compile(r"^(nccl:|FSDP::|## |ProfilerStep)|spin_kernel")
"""Named ranges that the device's timeline also shows, and the kernel of torch.cuda._sleep: no work of the step."""
_PRODUCT = re.compile(r"gemm|nvjet|xmma|splitk|triton_tem\w*_mm", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|attention", re.IGNORECASE)
"""Attention kernels, whose names may contain gemm."""


class Event(NamedTuple):
    """A kernel, a copy or a marker on the GPU."""

    name: str
    start_ns: int
    length_ns: int
    stream: int


class Interval(NamedTuple):
    """A kernel or copy that ran: times in ms from the first interval's start."""

    start_ms: float
    length_ms: float
    kind: int
    """PRODUCT, COMMUNICATION or OTHER."""


def gpu_profile(*more: ProfilerActivity) -> profile:
    """Return a profiler of the GPU's activities and of `more`, as a context manager."""
    global _has_run
    _has_run = True
    return profile(activities=[*more, ProfilerActivity.CUDA])


def profiled(step: Callable[[], None], context: Context) -> Any:
    """Run a step under the profiler of CPU and GPU, wait for its end, and return the profiler."""
    on_gpu = context.device.type == "cuda"
    with gpu_profile(ProfilerActivity.CPU) if on_gpu else profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize(context.device)
    return profiler


def has_run() -> bool:
    """Return whether this process has profiled a GPU."""
    return _has_run


def keep_trace(profiler: Any, context: Context) -> None:
    """Write this rank's Chrome trace beside the job's logs, as `trace_rank0.json.gz`."""
    profiler.export_chrome_trace(str(context.folder / f"trace_rank{context.rank}.json.gz"))


def events(profiler: Any) -> list[Event]:
    """Return each event on the GPU. Annotations are ranges of other work."""
    return [
        Event(event.name(), event.start_ns(), event.duration_ns(), event.device_resource_id())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]


def intervals(events: Iterable[Event]) -> list[Interval]:
    """Return the intervals of all kernels and copies, by start.

    A stream with nothing but copies counts as communication, because the profiler does not always name copies from a
    peer's mapped memory as such.
    """
    work = sorted((event for event in events if not _LABEL.search(event.name)), key=lambda event: event.start_ns)
    busy = {event.stream for event in work if not event.name.startswith("Memcpy")}
    return [
        Interval(
            (event.start_ns - work[0].start_ns) / 1e6,
            event.length_ns / 1e6,
            kind_of(event.name) if event.stream in busy else COMMUNICATION,
        )
        for event in work
    ]


def kind_of(name: str) -> int:
    """Return the kind of a kernel or copy by its name in the profiler."""
    if _COMMUNICATION.search(name):
        return COMMUNICATION
    return PRODUCT if _PRODUCT.search(name) and not _ATTENTION.search(name) else OTHER


def covered_ms(intervals: Iterable[Interval]) -> float:
    """Return the time in ms in which at least one of the intervals runs."""
    covered, reached = 0.0, -math.inf
    for start, length, _ in sorted(intervals):
        covered += max(0.0, start + length - max(start, reached))
        reached = max(reached, start + length)
    return covered


def busy_ms(timeline: Iterable[Interval]) -> tuple[float, float]:
    """Return the time in ms in which work other than communication runs, and in which only communication does."""
    timeline = list(timeline)
    computing = covered_ms(interval for interval in timeline if interval.kind != COMMUNICATION)
    return computing, covered_ms(timeline) - computing
