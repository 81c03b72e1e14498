"""Limit of the ranks that a job may have on this host's CPU cores."""

from __future__ import annotations

import math
import os

from tpbench.job import Job


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def too_many_ranks(job: Job, cores: int, ranks_per_core: int) -> str | None:
    """Return why a job on the CPU has too many ranks for that many cores, or None if it has not."""
    if job.device != "cpu" or job.world_size <= ranks_per_core * cores:
        return None
    needed = math.ceil(job.world_size / cores)
    return (
        f"{job.world_size} ranks would share {cores} CPU core{'s' * (cores > 1)}, and max_ranks_per_core="
        f"{ranks_per_core} allows {ranks_per_core * cores}: set max_ranks_per_core={needed} to run them"
    )
