"""How the samples of each cell lie about their median."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tpbench.report.layout import Section
from tpbench.report.plots import style
from tpbench.report.ratio import clean
from tpbench.report.samples import CLOCKS, measured, outliers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS = 40
"""Outliers drawn of a cell: the farthest."""


def draw(section: Section, clock: str) -> Figure | None:
    """A line for each cell: 5th to 95th percentile, quartiles and outliers, or None where there are no samples."""
    cells = [(cell, samples) for cell in measured(section) if len(samples := clean(cell.record[clock])) > 1]
    if not cells:
        return None
    figure = style.new_figure(7.5, 0.9 + 0.19 * len(cells))
    axes = figure.subplots()
    for place, (cell, samples) in enumerate(cells):
        middle = float(np.median(samples))
        away = 100 * (samples / middle - 1) if middle > 0 else samples * 0
        p5, q1, q3, p95 = np.percentile(away, [5, 25, 75, 95])
        paint = style.colour(cell.column)
        axes.plot([p5, p95], [place, place], color=paint, linewidth=1)
        axes.plot([q1, q3], [place, place], color=paint, linewidth=5, solid_capstyle="butt", alpha=0.6)
        far = outliers(away)
        far = far[np.argsort(-np.abs(far))][:DOTS]
        axes.plot(far, np.full(len(far), place), ".", color=paint, markersize=2.5)
        axes.plot(0, place, "|", color=style.ink(), markersize=6)
    axes.set_xscale("symlog", linthresh=10)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g}%")
    axes.set_yticks(range(len(cells)), [style.short(f"{cell.head}  {cell.problem}") for cell, _ in cells], fontsize=7)
    axes.set_ylim(len(cells) - 0.4, -0.6)
    figure.supxlabel(
        f"{CLOCKS[clock]} time of an iteration, away from the cell's median (linear within 10%)", fontsize=8
    )
    return figure
