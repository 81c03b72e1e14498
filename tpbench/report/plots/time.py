"""Time by size of the problem, with its floor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpbench.report.analysis.grid import RecordGrid
from tpbench.report.plots.by_size import draw_by_size
from tpbench.report.plots.registry import plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@plot("time", "Wall time by size, with its floor", columns=("time_ms", "floor_ms"))
def wall(grid: RecordGrid) -> Figure | None:
    """Draw the wall time."""
    return draw_by_size(grid, "time_ms", floor=True)


@plot("device_time", "Device time by size, with its floor", columns=("device_ms", "floor_ms"))
def device(grid: RecordGrid) -> Figure | None:
    """Draw the device time."""
    return draw_by_size(grid, "device_ms", floor=True)
