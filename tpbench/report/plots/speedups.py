"""Speed-up of the fastest column over the others, with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpbench.report.analysis.grid import RecordGrid
from tpbench.report.analysis.metrics import DEVICE, WALL, ClockColumns
from tpbench.report.analysis.verdicts import speedups
from tpbench.report.plots import style
from tpbench.report.plots.registry import plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@plot("speedup", "Speed-ups, wall time", columns=("samples_ms",))
def wall(grid: RecordGrid) -> Figure | None:
    """Draw speed-ups in wall time."""
    return draw(grid, WALL)


@plot("device_speedup", "Speed-ups, device time", columns=("device_samples_ms",))
def device(grid: RecordGrid) -> Figure | None:
    """Draw speed-ups in device time."""
    return draw(grid, DEVICE)


def draw(grid: RecordGrid, clock: ClockColumns) -> Figure | None:
    """Draw a dot for each column of each problem but the fastest. Return None if nothing can be compared."""
    found = speedups(grid, clock)
    if not found:
        return None
    figure = style.new_figure(7.5, 0.9 + 0.21 * len(found))
    axes = figure.subplots()
    for column in sorted({each.other.column_index for each in found}):
        heights = [height for height, each in enumerate(found) if each.other.column_index == column]
        ratios = [found[height].ratio for height in heights]
        below = [each.value - (each.low or each.value) for each in ratios]
        above = [(each.high or each.value) - each.value for each in ratios]
        axes.errorbar(
            [each.value for each in ratios], heights, xerr=[below, above], capsize=2,
            fmt=style.marker(column), color=style.colour(column),
        )  # fmt: skip
    axes.axvline(1, color=style.ink(), linewidth=1)
    if axes.get_xlim()[1] > 4:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}x" if f"{value:e}"[0] in "235" else "")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    names = [style.short(f"{each.fastest.column} over {each.other.column}  {each.problem}", 90) for each in found]
    style.name_lines(axes, names)
    figure.supxlabel(f"speed-up of the fastest, {clock.name} time (95% interval)", fontsize=8)
    return figure
