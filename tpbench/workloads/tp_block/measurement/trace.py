"""Trace one step with the profiler: intervals of products and communication, and how they overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo  # traces and optimizers need it: import it before jobs are forked, not in each
from torch.profiler import ProfilerActivity, profile

from tpbench.measure.gpu_profiler import gpu_profile
from tpbench.measure.session import Context
from tpbench.measure.timeline import COMMUNICATION, PRODUCT, Interval, events, intervals, keep_trace, spans

SLEEP_CYCLES = 200_000_000
"""About 0.1 s."""


def trace_step(step: Callable[[], None], context: Context, *, keep: bool) -> dict[str, Any]:
    """Trace one step and return its columns on rank 0. Collective.

    `keep`: trace all ranks, and write each rank's trace beside the job's logs. Otherwise a process that runs further
    jobs is not traced.
    """
    on_gpu = context.device.type == "cuda"
    if context.process_stays and not keep:
        return {}

    def queued_step() -> None:
        if on_gpu:  # launches are slow under a profiler: queue all of them before the first kernel runs
            torch.cuda._sleep(SLEEP_CYCLES)
        step()

    step()
    if context.rank and not keep:
        queued_step()
        return {}
    with gpu_profile(ProfilerActivity.CPU) if on_gpu else profile(activities=[ProfilerActivity.CPU]) as profiler:
        queued_step()
        if on_gpu:
            torch.cuda.synchronize(context.device)
    if keep:
        keep_trace(profiler, context)
    timeline = intervals(events(profiler, on_gpu), on_gpu)
    columns: dict[str, Any] = {
        "timeline_start_ms": [each.start_ms for each in timeline],
        "timeline_ms": [each.length_ms for each in timeline],
        "timeline_kind": [float(each.kind) for each in timeline],
        "timeline_lane": [float(each.lane) for each in timeline],
    }
    if on_gpu:
        columns["overlap_fraction"] = overlap_fraction(timeline)
    return columns


def overlap_fraction(timeline: Sequence[Interval]) -> float | None:
    """Return the fraction of communication time during which a product runs, or None without communication."""
    communication, products = (
        spans(each for each in timeline if each.kind == kind) for kind in (COMMUNICATION, PRODUCT)
    )
    total = sum(end - start for start, end in communication)
    both = sum(
        max(0.0, min(end, product_end) - max(start, product_start))
        for start, end in communication
        for product_start, product_end in products
    )
    return both / total if total else None
