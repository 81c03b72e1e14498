"""One more step under torch's profiler: how much communication shows, and the trace for who wants to look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tpbench.measure.session import Context
from tpbench.measure.timeline import COMMUNICATION, Interval, covered_ms, events, intervals, keep_trace


def profiled(train: Callable[[], None], restore: Callable[[], None], context: Context, *, keep: bool) -> dict[str, Any]:
    """On a GPU `exposed_share`, the most of any rank; with `keep` each rank's trace beside the job's logs."""
    restore()
    dist.barrier()
    cuda = context.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities if keep or not cuda else activities[1:]) as profiler:
        train()
        if cuda:
            torch.cuda.synchronize(context.device)
    if keep:
        keep_trace(profiler, context)
    if not cuda:
        return {}
    share = torch.tensor(exposed_share(intervals(events(profiler, on_gpu=True), on_gpu=True)), dtype=torch.float64)
    dist.all_reduce(share, dist.ReduceOp.MAX)
    return {"exposed_share": float(share)}


def exposed_share(found: Sequence[Interval]) -> float:
    """The share of the time from the first one's begin to the last one's end in which communication runs and nothing
    else does."""
    if not found:
        return 0.0
    whole = max(each.start_ms + each.length_ms for each in found) - min(each.start_ms for each in found)
    return (covered_ms(found) - covered_ms(each for each in found if each.kind != COMMUNICATION)) / whole
