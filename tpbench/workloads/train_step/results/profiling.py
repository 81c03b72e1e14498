"""Profile one additional step: measure the exposed communication, and keep the profiler's trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tpbench.measure.gpu_profiler import gpu_profile
from tpbench.measure.session import Context
from tpbench.measure.timeline import COMMUNICATION, Interval, covered_ms, events, intervals, keep_trace


def profile_step(train: Callable[[], None], restore: Callable[[], None], context: Context) -> dict[str, Any]:
    """Profile one step and keep each rank's trace beside the job's logs. On a GPU, return `exposed_share`, the largest
    of any rank.

    `train` trains the step, `restore` prepares it. Collective.
    """
    restore()
    dist.barrier()
    cuda = context.device.type == "cuda"
    with gpu_profile(ProfilerActivity.CPU) if cuda else profile(activities=[ProfilerActivity.CPU]) as profiler:
        train()
        if cuda:
            torch.cuda.synchronize(context.device)
    keep_trace(profiler, context)
    if not cuda:
        return {}
    share = torch.tensor(exposed_share(intervals(events(profiler, on_gpu=True), on_gpu=True)), dtype=torch.float64)
    dist.all_reduce(share, dist.ReduceOp.MAX)
    return {"exposed_share": float(share)}


def exposed_share(timeline: Sequence[Interval]) -> float:
    """Return the share of the timeline, from its first begin to its last end, in which only communication runs."""
    if not timeline:
        return 0.0
    whole = max(each.start_ms + each.length_ms for each in timeline) - min(each.start_ms for each in timeline)
    return (covered_ms(timeline) - covered_ms(each for each in timeline if each.kind != COMMUNICATION)) / whole
