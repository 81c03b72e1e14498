"""torch's profiler, and the intervals of a profiled step: when products, communication and other work ran.

The profiler of a GPU slows later launches of its process down, because CUPTI stays attached. pytorch/pytorch#146604
reports steps that are 10 to 20% slower after a profile. Detaching CUPTI is no way out: it can crash together with CUDA
graphs (pytorch/pytorch#144455). So a process that has profiled a GPU runs no further job.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tpbench.measure.session import Context

_has_run = False


Event = tuple[str, int, int, int]
"""Name, start in ns, length in ns, and stream or thread."""

Span = tuple[float, float]
"""Start and end."""

PRODUCT, COMMUNICATION, OTHER = range(3)

_GPU_COMMUNICATION = re.compile(r"nccl|memcpy ptop|symm_mem|symmetric_memory|barrier_kernel|push_kernel", re.IGNORECASE)
"""Kernels of collectives, copies between GPUs by their copy engines, kernels that write to peers or wait for them."""
_GPU_LABEL = re.compile(r"^(nccl:|FSDP::|## |ProfilerStep)|spin_kernel")
"""Named ranges that the device's timeline also shows, and the kernel of torch.cuda._sleep: no work of the step."""
_GPU_PRODUCT = re.compile(r"gemm|nvjet|xmma|splitk|triton_tem\w*_mm", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|attention", re.IGNORECASE)
"""Attention kernels, whose names may contain gemm."""
_CPU_COMMUNICATION = re.compile(r"^gloo:")
_CPU_PRODUCT = re.compile(r"^aten::(mm|addmm|bmm)$")
_CPU_OTHER = re.compile(r"^aten::(scaled_dot_product_attention|_scaled_dot_product\w*_backward|rms_norm|silu\w*|mul)$")


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


@dataclass(frozen=True)
class Interval:
    """A kernel, copy or operation that ran: times in ms from the first interval's start."""

    start_ms: float
    length_ms: float
    kind: int
    """PRODUCT, COMMUNICATION or OTHER."""
    lane: int
    """Stream or thread, numbered in the order of appearance."""


def keep_trace(profiler: Any, context: Context) -> None:
    """Write this rank's Chrome trace beside the job's logs, as `trace_rank0.json.gz`."""
    profiler.export_chrome_trace(str(context.folder / f"trace_rank{context.rank}.json.gz"))


def events(profiler: Any, on_gpu: bool) -> list[Event]:
    """Return each event on the device."""
    result = []
    for event in profiler.profiler.kineto_results.events():
        # On a GPU annotations are ranges of other work. On a CPU gloo's collectives appear as annotations.
        if (event.device_type() == DeviceType.CUDA) == on_gpu and not (on_gpu and event.is_user_annotation()):
            lane = event.device_resource_id() if on_gpu else event.start_thread_id()
            result.append((event.name(), event.start_ns(), event.duration_ns(), lane))
    return result


def intervals(events: Iterable[Event], on_gpu: bool) -> list[Interval]:
    """Return the intervals of events by start: on a GPU all kernels and copies, on a CPU those of `kind_of`.

    On a GPU a stream with nothing but copies counts as communication, because the profiler does not always name copies
    from a peer's mapped memory as such.
    """
    kept = [(event, kind) for event in events if (kind := kind_of(event[0], on_gpu)) is not None]
    kept.sort(key=lambda pair: pair[0][1])
    busy = {lane for (name, _, _, lane), _ in kept if not name.startswith("Memcpy")}
    if on_gpu:
        kept = [(event, kind if event[3] in busy else COMMUNICATION) for event, kind in kept]
    lanes: dict[int, int] = {}
    begin = kept[0][0][1] if kept else 0
    return [
        Interval((start - begin) / 1e6, length / 1e6, kind, lanes.setdefault(lane, len(lanes)))
        for (_, start, length, lane), kind in kept
    ]


def kind_of(name: str, on_gpu: bool) -> int | None:
    """Return the kind of an event by its name in the profiler, or None if the event is not work of the step."""
    if on_gpu:
        if _GPU_LABEL.search(name):
            return None
        if _GPU_COMMUNICATION.search(name):
            return COMMUNICATION
        return PRODUCT if _GPU_PRODUCT.search(name) and not _ATTENTION.search(name) else OTHER
    kinds = ((_CPU_COMMUNICATION, COMMUNICATION), (_CPU_PRODUCT, PRODUCT), (_CPU_OTHER, OTHER))
    return next((kind for pattern, kind in kinds if pattern.search(name)), None)


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, as sorted spans that do not overlap."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def spans(intervals: Iterable[Interval]) -> list[Span]:
    """Return the spans in which at least one of the intervals runs."""
    return union((interval.start_ms, interval.start_ms + interval.length_ms) for interval in intervals)


def covered_ms(intervals: Iterable[Interval]) -> float:
    """Return the time in ms in which at least one of the intervals runs."""
    return sum(end - start for start, end in spans(intervals))
