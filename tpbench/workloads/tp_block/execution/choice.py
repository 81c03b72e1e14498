"""The choice between schedules, and between ways to run the whole step, by measured times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PLAIN, MIXED = "plain", "mixed"

MIN_GAIN = 0.01
"""A schedule replaces the plain one only if it saves more than this fraction of the plain time: noise is smaller."""

MAX_LOSS = 0.004
"""A step that loses more than this fraction of the plain step's time by one clock is not chosen by the other clock."""


@dataclass(frozen=True)
class Candidate:
    """A way to run the whole step."""

    plan: str
    """The name of a schedule, or "mixed" for the fastest one of each operation."""
    graphs: bool = False
    """True if the forward and the backward pass are CUDA graphs."""


@dataclass(frozen=True)
class StepTimes:
    """Median times of a step in ms, of the slowest rank."""

    wall_ms: float
    device_ms: float
    """On a CPU equal to the wall time."""


def fastest(times_ms: Mapping[str, float]) -> str:
    """Return the name of the fastest schedule: the plain one unless another is clearly faster."""
    best = min(times_ms, key=lambda name: times_ms[name])
    return best if times_ms[best] < (1 - MIN_GAIN) * times_ms[PLAIN] else PLAIN


def best_step(times: Mapping[Candidate, StepTimes], plain: Candidate = Candidate(PLAIN)) -> Candidate:
    """Return the candidate with the least wall time, or else with the least device time, or else the plain one.

    Only candidates that are not slower than the plain one by either clock count. The least time must be clearly less
    than the plain one.
    """
    limit = times[plain]
    fair = [
        candidate
        for candidate, step in times.items()
        if step.wall_ms <= (1 + MAX_LOSS) * limit.wall_ms and step.device_ms <= (1 + MAX_LOSS) * limit.device_ms
    ]
    by_wall = min(fair, key=lambda candidate: times[candidate].wall_ms)
    if times[by_wall].wall_ms < (1 - MIN_GAIN) * limit.wall_ms:
        return by_wall
    by_device = min(fair, key=lambda candidate: times[candidate].device_ms)
    return by_device if times[by_device].device_ms < (1 - MIN_GAIN) * limit.device_ms else plain
