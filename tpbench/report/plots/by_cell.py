"""A line for each cell: speed-ups with their intervals, and the distribution of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tpbench.report.analysis.grid import RecordGrid
from tpbench.report.analysis.metrics import Array, ClockColumns, clean, outliers
from tpbench.report.analysis.verdicts import speedups
from tpbench.report.plots import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS = 40
"""Most outliers that are drawn of a cell: the farthest."""


def speedup(grid: RecordGrid, clock: ClockColumns) -> Figure | None:
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
    axes.axvline(1, color=style.INK, linewidth=1)
    if axes.get_xlim()[1] > 4:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}x" if f"{value:e}"[0] in "235" else "")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    names = [style.short(f"{each.fastest.column} over {each.other.column}  {each.problem}", 90) for each in found]
    style.name_lines(axes, names)
    figure.supxlabel(f"speed-up of the fastest, {clock.name} time (95% interval)", fontsize=8)
    return figure


def spread(grid: RecordGrid, clock: ClockColumns) -> Figure | None:
    """Draw percentiles 5 to 95, quartiles and outliers of each cell. Return None if there are no samples."""
    cells = [
        (problem, cell, samples)
        for problem, cell in grid.measured_cells()
        if len(samples := clean(cell.record[clock.samples_column])) > 1
    ]
    if not cells:
        return None
    figure = style.new_figure(7.5, 0.9 + 0.19 * len(cells))
    axes = figure.subplots()
    heights = np.arange(len(cells))
    colours = [style.colour(cell.column_index) for _, cell, _ in cells]
    deviations = [_deviations(samples) for _, _, samples in cells]
    p5, q1, q3, p95 = np.transpose([np.percentile(each, [5, 25, 75, 95]) for each in deviations])
    axes.hlines(heights, p5, p95, colours, linewidth=1, capstyle="projecting")
    axes.hlines(heights, q1, q3, colours, linewidth=5, alpha=0.6)
    for colour in dict.fromkeys(colours):
        rows = [height for height in heights if colours[height] == colour]
        dots = [(far, height) for height in rows for far in _farthest(deviations[height])]
        axes.plot(*np.reshape(dots, (-1, 2)).T, ".", color=colour, markersize=2.5)
    axes.plot(np.zeros(len(cells)), heights, "|", color=style.INK, markersize=6)
    axes.set_xscale("symlog", linthresh=10)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g}%")
    style.name_lines(axes, [style.short(f"{cell.column}  {problem}") for problem, cell, _ in cells])
    figure.supxlabel(f"{clock.name} time of an iteration, away from the cell's median (linear within 10%)", fontsize=8)
    return figure


def _deviations(samples: Array) -> Array:
    """Return the deviations from the median, in percent of it."""
    middle = float(np.median(samples))
    return 100 * (samples / middle - 1) if middle > 0 else samples * 0


def _farthest(deviations: Array) -> Array:
    far = outliers(deviations)
    return far[np.argsort(-np.abs(far))][:DOTS]
