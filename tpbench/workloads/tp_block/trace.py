"""A step as the profiler sees it: which intervals are products, which communication, and how they overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tpbench.measure.session import Context
from tpbench.measure.timeline import COMMUNICATION, PRODUCT, Interval, events, intervals, keep_trace, spans

SLEEP_CYCLES = 200_000_000
"""Some 0.1 s."""


def of_step(step: Callable[[], None], context: Context, *, keep: bool) -> dict[str, Any]:
    """The columns about one traced step on rank 0; with `keep` each rank's trace beside the job's logs. Collective."""
    on_gpu = context.device.type == "cuda"

    def queued() -> None:
        if on_gpu:  # launches are slow under a profiler: all are queued before the first kernel runs
            torch.cuda._sleep(SLEEP_CYCLES)
        step()

    step()
    if context.rank and not keep:
        queued()
        return {}
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        queued()
        if on_gpu:
            torch.cuda.synchronize(context.device)
    if keep:
        keep_trace(profiler, context)
    found = intervals(events(profiler, on_gpu), on_gpu)
    columns: dict[str, Any] = {
        "timeline_start_ms": [each.start for each in found],
        "timeline_ms": [each.length for each in found],
        "timeline_kind": [float(each.kind) for each in found],
        "timeline_lane": [float(each.lane) for each in found],
    }
    if on_gpu:
        columns["overlap_fraction"] = overlap_fraction(found)
    return columns


def overlap_fraction(found: Sequence[Interval]) -> float | None:
    """Share of the time with communication during which a product runs, or None where there is none."""
    communication, products = (spans(each for each in found if each.kind == kind) for kind in (COMMUNICATION, PRODUCT))
    total = sum(end - start for start, end in communication)
    both = sum(
        max(0.0, min(end, until) - max(start, since)) for start, end in communication for since, until in products
    )
    return both / total if total else None
