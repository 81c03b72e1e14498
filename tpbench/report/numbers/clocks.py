"""The two clocks of a measurement, with their columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """A clock that times iterations."""

    name: str
    time_column: str
    """Column of the median."""
    samples_column: str
    """Column of the times of all iterations."""


DEVICE = Clock("device", "device_ms", "device_samples_ms")
WALL = Clock("wall", "time_ms", "samples_ms")
CLOCKS = (DEVICE, WALL)
"""All clocks, the leading one first."""
