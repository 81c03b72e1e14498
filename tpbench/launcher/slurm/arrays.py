"""Split of jobs into Slurm arrays. An array has a maximum length, and a limit on the jobs that run at once."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ArrayPlan:
    """One array of jobs."""

    size: int
    parallelism: int
    """Most of its jobs that may run at once."""
    after: int | None
    """Index of the array that must end before this one begins, or None."""


def split_into_arrays(jobs: int, max_length: int, parallelism: int) -> list[ArrayPlan]:
    """Return the fewest arrays that hold the jobs, of about equal size.

    All arrays together run at most `parallelism` jobs at once. Each array gets a share of that number. If there are
    more arrays than shares, the other arrays wait for one of the first.
    """
    count = math.ceil(jobs / max_length)
    shares = min(count, parallelism)
    return [
        ArrayPlan(
            size=_share(jobs, count, index),
            parallelism=_share(parallelism, shares, index % shares),
            after=index - shares if index >= shares else None,
        )
        for index in range(count)
    ]


def _share(total: int, count: int, index: int) -> int:
    return total // count + (index < total % count)
