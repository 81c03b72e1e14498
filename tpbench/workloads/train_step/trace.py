"""One more step under torch's profiler: how much communication shows, and the trace for who wants to look."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from tpbench.context import Context

COMMUNICATION = ("nccl", "symm_mem", "symmetric_memory", "Memcpy PtoP", "barrier_kernel")
"""What the names of kernels and copies between GPUs contain."""
ANNOTATIONS = ("nccl:", "FSDP::", "## ", "ProfilerStep")
"""How the names of annotated ranges begin, which the device's timeline shows too."""

Interval = tuple[float, float]


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
        profiler.export_chrome_trace(str(context.folder / f"trace_rank{context.rank}.json.gz"))
    if not cuda:
        return {}
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA
        and event.time_range.end > event.time_range.start
        and not (event.is_user_annotation or event.name.startswith(ANNOTATIONS))
    ]
    share = torch.tensor(exposed_share(kernels), dtype=torch.float64)
    dist.all_reduce(share, dist.ReduceOp.MAX)
    return {"exposed_share": float(share)}


def exposed_share(kernels: Iterable[tuple[str, float, float]]) -> float:
    """The share of the time from the first kernel's begin to the last one's end in which communication runs and nothing
    else does. Kernels as (name, begin, end)."""
    talking: list[Interval] = []
    computing: list[Interval] = []
    for name, begin, end in kernels:
        (talking if any(word in name for word in COMMUNICATION) else computing).append((begin, end))
    everything = talking + computing
    if not everything:
        return 0.0
    whole = max(end for _, end in everything) - min(begin for begin, _ in everything)
    return float((_covered(everything) - _covered(computing)) / whole)


def _covered(intervals: Iterable[Interval]) -> float:
    """The length of their union."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
