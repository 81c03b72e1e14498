"""A step as the profiler sees it: which intervals are products, which communication, and how they overlap."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tpbench.context import Context

PRODUCT, COMMUNICATION, OTHER = range(3)

SLEEP_CYCLES = 200_000_000
"""Some 0.1 s."""

_GPU_COMMUNICATION = re.compile(r"nccl|memcpy ptop", re.IGNORECASE)
"""Kernels of collectives, and copies between GPUs by their copy engines."""
_GPU_PRODUCT = re.compile(r"gemm|nvjet|xmma|splitk|triton_tem\w*_mm", re.IGNORECASE)
_SLEEP = "spin_kernel"
"""The kernel of torch.cuda._sleep."""
_ATTENTION = re.compile(r"flash|fmha|attention", re.IGNORECASE)
"""Its kernels have parts that are called gemm."""
_CPU_COMMUNICATION = re.compile(r"^gloo:")
_CPU_PRODUCT = re.compile(r"^aten::(mm|addmm|bmm)$")
_CPU_OTHER = re.compile(r"^aten::(scaled_dot_product_attention|_scaled_dot_product\w*_backward|rms_norm|silu\w*|mul)$")


@dataclass(frozen=True)
class Interval:
    """Something that ran, in ms from the step's begin."""

    start: float
    length: float
    kind: int
    lane: int
    """Stream or thread, numbered in the order of appearance."""


def of_step(step: Callable[[], None], context: Context, folder: Path | None) -> dict[str, Any]:
    """The columns about one traced step on rank 0, and each rank's trace in the folder, if any. Collective."""
    on_gpu = context.device.type == "cuda"

    def queued() -> None:
        if on_gpu:  # launches are slow under a profiler: all are queued before the first kernel runs
            torch.cuda._sleep(SLEEP_CYCLES)
        step()

    step()
    if context.rank and not folder:
        queued()
        return {}
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        queued()
        if on_gpu:
            torch.cuda.synchronize(context.device)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank{context.rank}.json"))
    found = intervals(_events(profiler, on_gpu), on_gpu)
    columns: dict[str, Any] = {
        "timeline_start_ms": [each.start for each in found],
        "timeline_ms": [each.length for each in found],
        "timeline_kind": [float(each.kind) for each in found],
        "timeline_lane": [float(each.lane) for each in found],
    }
    if on_gpu:
        columns["overlap_fraction"] = overlap_fraction(found)
    return columns


def _events(profiler: Any, on_gpu: bool) -> list[tuple[str, int, int, int]]:
    """(name, start ns, length ns, stream or thread) of what ran on the device."""
    found = []
    for event in profiler.profiler.kineto_results.events():
        if (event.device_type() == DeviceType.CUDA) == on_gpu:
            lane = event.device_resource_id() if on_gpu else event.start_thread_id()
            found.append((event.name(), event.start_ns(), event.duration_ns(), lane))
    return found


def intervals(events: Iterable[tuple[str, int, int, int]], on_gpu: bool) -> list[Interval]:
    """What ran, in order: on a GPU every kernel and copy, on a CPU products, collectives and the longest others.

    A GPU's stream that does nothing but copy is one of transfers, whatever the profiler calls copies of memory that is
    mapped from a peer.
    """
    kept = [(event, kind) for event in events if (kind := kind_of(event[0], on_gpu)) is not None]
    kept.sort(key=lambda each: each[0][1])
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
    """What an event is, by the profiler's name for it; None for what is no work of its own."""
    if on_gpu:
        if name.startswith("nccl:") or _SLEEP in name:  # the former labels the span of a collective's kernels
            return None
        if _GPU_COMMUNICATION.search(name):
            return COMMUNICATION
        return PRODUCT if _GPU_PRODUCT.search(name) and not _ATTENTION.search(name) else OTHER
    kinds = ((_CPU_COMMUNICATION, COMMUNICATION), (_CPU_PRODUCT, PRODUCT), (_CPU_OTHER, OTHER))
    return next((kind for pattern, kind in kinds if pattern.search(name)), None)


def overlap_fraction(found: Sequence[Interval]) -> float | None:
    """Share of the time with communication during which a product runs, or None where there is none."""
    communication, products = (
        _union([(each.start, each.start + each.length) for each in found if each.kind == kind])
        for kind in (COMMUNICATION, PRODUCT)
    )
    total = sum(end - start for start, end in communication)
    both = sum(
        max(0.0, min(end, until) - max(start, since)) for start, end in communication for since, until in products
    )
    return both / total if total else None


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as spans that do not overlap."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
