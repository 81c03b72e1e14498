"""How the samples of each cell lie about their median."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tpbench.report.layout import Section
from tpbench.report.plots import style
from tpbench.report.ratio import Array, clean
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
    heights = np.arange(len(cells))
    paints = [style.colour(cell.column) for cell, _ in cells]
    away = [_away(samples) for _, samples in cells]
    p5, q1, q3, p95 = np.transpose([np.percentile(each, [5, 25, 75, 95]) for each in away])
    axes.hlines(heights, p5, p95, paints, linewidth=1, capstyle="projecting")
    axes.hlines(heights, q1, q3, paints, linewidth=5, alpha=0.6)
    for paint in dict.fromkeys(paints):
        dots = [(far, height) for height in heights if paints[height] == paint for far in _farthest(away[height])]
        axes.plot(*np.reshape(dots, (-1, 2)).T, ".", color=paint, markersize=2.5)
    axes.plot(np.zeros(len(cells)), heights, "|", color=style.ink(), markersize=6)
    axes.set_xscale("symlog", linthresh=10)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g}%")
    style.name_lines(axes, [style.short(f"{cell.head}  {cell.problem}") for cell, _ in cells])
    figure.supxlabel(
        f"{CLOCKS[clock]} time of an iteration, away from the cell's median (linear within 10%)", fontsize=8
    )
    return figure


def _away(samples: Array) -> Array:
    """How far the samples are from their median, in percent of it."""
    middle = float(np.median(samples))
    return 100 * (samples / middle - 1) if middle > 0 else samples * 0


def _farthest(away: Array) -> Array:
    far = outliers(away)
    return far[np.argsort(-np.abs(far))][:DOTS]
