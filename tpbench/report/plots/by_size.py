"""A metric by the size of the problem: a panel for each world size, a line for each variant."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from tpbench.report.analysis.grid import GridRow, RecordGrid
from tpbench.report.analysis.metrics import TITLES, metric
from tpbench.report.analysis.records import Record, column_label, is_measurement, sort_key, value_text
from tpbench.report.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PER_ROW = 3
"""Most panels side by side."""
INCHES_PER_LETTER = 0.075
"""Width of a letter of a tick's label or of a title."""
PANEL_INCHES = 3.3


def draw(grid: RecordGrid, name: str, *, floor: bool = False) -> Figure | None:
    """Draw a line for each column of the grid. Return None if no cell has the metric."""
    axis = size_axis(grid)
    panels = {title: rows for title, rows in size_panels(grid, axis).items() if has_content(rows, name)}
    if not any(drawn_value(cell.record, name) is not None for cell in grid.cells()):
        return None
    shown = metric(name)
    across = min(PER_ROW, len(panels))
    down = -(-len(panels) // across)
    texts = [style.short(column) for column in grid.columns]
    width = max(5.2, PANEL_INCHES * across, style.legend_inches(texts))
    legend_columns = style.legend_columns(texts, width)
    figure = style.new_figure(width, 2.9 * down + 0.2 * -(-len(texts) // legend_columns))
    axes_grid = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes in axes_grid.flat[len(panels) :]:
        axes.set_visible(False)
    letters = int(width / across / INCHES_PER_LETTER) - 6
    for axes, (title, rows) in zip(axes_grid.flat, panels.items(), strict=False):
        _draw_panel(axes, grid, axis, rows, name, letters)
        if floor:
            _draw_floor(axes, axis, rows)
        axes.set_title(textwrap.fill(title, letters))
        axes.set_xlabel(column_label(grid.key_names[axis]))
    for first, *others in axes_grid:
        first.set_ylabel(f"{TITLES.get(name, name).lower()} ({shown.unit})")
        first.tick_params(axis="y", which="minor", labelsize=6)
        for axes in others:  # minor ticks without labels are not worth the time to draw them
            axes.tick_params(axis="y", which="minor", left=False)
    shared = axes_grid.flat[0]  # all panels share its y axis, so one call is enough
    shared.set_yscale("log", subs=(2, 5))
    shared.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    shared.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    low, high = shared.get_ylim()
    shared.set_ylim(min(low, high / 4), max(high, low * 4))  # room for one or two ticks with a label
    style.common_legend(figure, axes_grid.flat, legend_columns)
    return figure


def _draw_panel(axes: Axes, grid: RecordGrid, axis: int, rows: list[GridRow], name: str, letters: int) -> None:
    """Draw the lines of one panel. `letters` is how many letters of tick labels fit side by side."""
    position = size_positions(axis, rows)
    cross_height = 0.99
    for index, column in enumerate(grid.columns):
        by_size = {row.key[axis]: row.records[index] for row in rows}
        values = {size: drawn_value(record, name) for size, record in by_size.items()}
        points = [(position[size], value) for size, value in values.items() if value is not None]
        look: dict[str, Any] = {"color": style.colour(index), "marker": style.marker(index)}
        if points:
            axes.plot(*zip(*sorted(points), strict=True), label=style.short(column), **look)
        out_of_memory = [position[size] for size, record in by_size.items() if record and record["status"] == "oom"]
        if out_of_memory:
            axes.plot(
                out_of_memory, [cross_height] * len(out_of_memory), transform=axes.get_xaxis_transform(),
                linestyle="", marker="x", clip_on=False, color=style.colour(index),
                label=f"{style.short(column)}: out of memory",
            )  # fmt: skip
            cross_height -= 0.05
    labels = [value_text(size) for size in position]
    axes.set_xticks(range(len(labels)), labels)
    if sum(len(text) + 2 for text in labels) > letters:
        axes.tick_params(axis="x", rotation=60)
    axes.set_xlim(-0.3, len(labels) - 0.7)


def _draw_floor(axes: Axes, axis: int, rows: list[GridRow]) -> None:
    """Draw the lowest floor of each size."""
    if lowest := lowest_floors(axis, rows):
        axes.plot(*zip(*lowest, strict=True), "--", color=style.ink(), marker="_", label="floor")


def size_axis(grid: RecordGrid) -> int:
    """Return the index of the key along the x axis.

    Use the first key. If every panel would then have a single x value, use the key with the most values in one panel.
    """

    def most_values(axis: int) -> int:
        return max(len({row.key[axis] for row in rows}) for rows in size_panels(grid, axis).values())

    return 0 if most_values(0) > 1 else max(grid.independent, key=most_values)


def size_panels(grid: RecordGrid, axis: int) -> dict[str, list[GridRow]]:
    """Group the rows by their other keys, under a title of those that vary.

    A key that follows from the name along the axis, such as the layers of a model, makes no panel of its own.
    """
    others = [at for at in grid.independent if at != axis and not grid.follows(at, axis)]
    varying = [at for at in grid.varying if at in others] or others
    panels: dict[str, list[GridRow]] = {}
    for row in sorted(grid.rows, key=lambda row: [sort_key(value) for value in row.key]):
        title = ", ".join(f"{column_label(grid.key_names[at])} {value_text(row.key[at])}" for at in varying)
        panels.setdefault(title, []).append(row)
    return panels


def has_sizes(grid: RecordGrid) -> bool:
    """Return true if some column was measured at two sizes of a panel: a line then joins them."""
    if not grid.rows:
        return False
    axis = size_axis(grid)
    return any(
        len({row.key[axis] for row in rows if row.records[index]}) > 1
        for rows in size_panels(grid, axis).values()
        for index in range(len(grid.columns))
    )


def has_content(rows: list[GridRow], name: str) -> bool:
    """Return true if some cell has the metric or ran out of memory."""
    records = [record for row in rows for record in row.records if record]
    return any(record["status"] == "oom" or drawn_value(record, name) is not None for record in records)


def size_positions(axis: int, rows: list[GridRow]) -> dict[Any, int]:
    """Return the position of each size on the x axis: numbers in their order, names by their lowest floor."""
    floors: dict[Any, float] = {}
    for row in rows:
        found = [record.get("floor_ms") or math.inf for record in row.records if record]
        floors[row.key[axis]] = min([floors.get(row.key[axis], math.inf), *found])
    ordered = sorted(floors, key=sort_key)
    if any(isinstance(size, str) for size in floors):
        ordered.sort(key=lambda size: floors[size])
    return {size: index for index, size in enumerate(ordered)}


def lowest_floors(axis: int, rows: list[GridRow]) -> list[tuple[int, float]]:
    """Return the lowest floor of each size with its position, in ms."""
    position = size_positions(axis, rows)
    lowest: dict[int, float] = {}
    for row in rows:
        floors = [record["floor_ms"] for record in row.records if record and record["floor_ms"]]
        if floors:
            lowest[position[row.key[axis]]] = min(floors)
    return sorted(lowest.items())


def drawn_value(record: Record | None, name: str) -> float | None:
    """Return the metric of a measurement, or None if a logarithmic axis cannot show it."""
    if record is None or not is_measurement(record):
        return None
    value = record[name]
    return float(value) if value is not None and 0 < value < float("inf") else None
