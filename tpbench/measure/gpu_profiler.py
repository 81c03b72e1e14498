"""torch's profiler for GPUs. It slows later launches of its process down, because CUPTI stays attached.

pytorch/pytorch#146604 reports steps that are 10 to 20% slower after a profile. Detaching CUPTI is no way out: it can
crash together with CUDA graphs (pytorch/pytorch#144455). So a process that has profiled a GPU runs no further job.
"""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

_has_run = False


def gpu_profile(*more: ProfilerActivity) -> profile:
    """Return a profiler of the GPU's activities and of `more`, as a context manager."""
    global _has_run
    _has_run = True
    return profile(activities=[*more, ProfilerActivity.CUDA])


def has_run() -> bool:
    """Return whether this process has profiled a GPU."""
    return _has_run
