"""The picture of a study: panels of ratios that a workload computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpbench.report.plots import style
from tpbench.workloads.study_data import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PER_ROW = 3
"""Most panels side by side."""


def draw_panels(picture: Picture) -> Figure:
    """Draw lines on a logarithmic axis of ratios, and the vertical lines in the colour of their series."""
    labels = sorted({line.label for panel in picture.panels for line in panel.lines})
    across = min(PER_ROW, len(picture.panels))
    down = -(-len(picture.panels) // across)
    figure = style.new_figure(max(5.2, 3.6 * across), 3.4 * down + 0.2 * -(-len(labels) // 3))
    grid = list(figure.subplots(down, across, sharey=True, squeeze=False).flat)
    for axes in grid[len(picture.panels) :]:
        axes.remove()
    grid = grid[: len(picture.panels)]
    for axes, panel in zip(grid, picture.panels, strict=True):
        for line in panel.lines:
            index = labels.index(line.label)
            xs, ys = zip(*line.points, strict=True)
            axes.plot(xs, ys, label=line.label, color=style.colour(index), marker=style.marker(index))
        for mark in panel.vertical_lines:
            colour = style.colour(labels.index(mark.label))
            axes.axvline(mark.x, color=colour, linestyle=":" if mark.dotted else "-", linewidth=1)
        axes.axhline(1, color=style.ink(), linewidth=1)
        axes.set_title(panel.title)
        axes.set_xlabel(picture.x_label)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    for axes in grid[::across]:
        axes.set_ylabel(picture.y_label)
    style.common_legend(figure, grid, style.legend_columns(labels, figure.get_figwidth()))
    return figure
