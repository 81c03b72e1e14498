"""The picture of a study: panels of ratios that a workload computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpbench.report.plots import style
from tpbench.workloads.study_data import Panel, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PER_ROW = 3
"""Most panels side by side."""


def draw_panels(picture: Picture) -> Figure:
    """Draw series, and the vertical lines in the colour of their series."""
    labels = sorted({line.label for panel in picture.panels for line in panel.lines})
    across = min(PER_ROW, len(picture.panels))
    down = -(-len(picture.panels) // across)
    figure = style.new_figure(
        max(5.2, 3.6 * across, style.legend_inches(labels)), 3.4 * down + 0.2 * -(-len(labels) // 3)
    )
    grid = list(figure.subplots(down, across, sharey=True, squeeze=False).flat)
    for axes in grid[len(picture.panels) :]:
        axes.remove()
    grid = grid[: len(picture.panels)]
    for axes, panel in zip(grid, picture.panels, strict=True):
        _draw_series(axes, panel, labels, joined=picture.ratios)
        axes.set_title(panel.title)
        axes.set_xlabel(picture.x_label)
        _scale(axes, picture)
    for axes in grid[::across]:
        axes.set_ylabel(picture.y_label)
    style.common_legend(figure, grid, style.legend_columns(labels, figure.get_figwidth()))
    return figure


def _draw_series(axes: Axes, panel: Panel, labels: Sequence[str], *, joined: bool) -> None:
    """Draw the series of one panel. The index of a label in `labels` chooses the colour and the marker."""
    for line in panel.lines:
        index = labels.index(line.label)
        xs, ys = zip(*line.points, strict=True)
        axes.plot(
            xs, ys, label=None if line.dashed else line.label, color=style.colour(index),
            marker=style.marker(index), linestyle="--" if line.dashed else "-" if joined else "",
            clip_on=joined,  # a point on an axis is drawn whole
        )  # fmt: skip
        for at, text in zip(line.points, line.texts, strict=False):
            axes.annotate(text, at, (4, 3), textcoords="offset points", fontsize=6)
    for mark in panel.vertical_lines:
        colour = style.colour(labels.index(mark.label))
        axes.axvline(mark.x, color=colour, linestyle=":" if mark.dotted else "-", linewidth=1)


def _scale(axes: Axes, picture: Picture) -> None:
    if picture.doubling:
        axes.set_xscale("log", base=2)
        axes.set_xticks(picture.doubling, [f"{value:g}" for value in picture.doubling])
        axes.set_xlim(picture.doubling[0] / 1.3, picture.doubling[-1] * 1.3)
        axes.minorticks_off()
    if picture.ratios:
        axes.axhline(1, color=style.ink(), linewidth=1)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        if picture.doubling:
            axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}x")
        return
    points = [point for each in picture.panels for line in each.lines for point in line.points]
    axes.set_xlim(0, 1.15 * max(x for x, _ in points))  # room for the text beside a point
    axes.set_ylim(0, 1.1 * max(y for _, y in points))
