"""How many jobs become Slurm arrays: an array has a greatest length, and is the only thing that limits how many run."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Some of the jobs, one array."""

    size: int
    parallelism: int
    """Of its jobs that may run at once."""
    after: int | None
    """The part, by its number, that must be over before this one begins."""


def parts(jobs: int, longest: int, parallelism: int) -> list[Part]:
    """As few arrays as hold so many jobs, about equal, of which `parallelism` jobs at most run at once, all together.

    The arrays share that number. Where there are more of them than it can be shared among, the others queue behind.
    """
    number = math.ceil(jobs / longest)
    lanes = min(number, parallelism)
    return [
        Part(_share(jobs, number, at), _share(parallelism, lanes, at % lanes), at - lanes if at >= lanes else None)
        for at in range(number)
    ]


def _share(total: int, among: int, at: int) -> int:
    return total // among + (at < total % among)
