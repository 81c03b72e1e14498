"""Peak memory by size of the problem."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpbench.report.analysis.grid import RecordGrid
from tpbench.report.plots.by_size import draw_by_size
from tpbench.report.plots.registry import plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@plot("memory", "Extra peak memory by size", columns=("peak_gib",))
def memory(grid: RecordGrid) -> Figure | None:
    """Draw the memory beyond the inputs."""
    return draw_by_size(grid, "peak_gib")
