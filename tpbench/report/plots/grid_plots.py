"""Plots of a grid of records, as files and in pages. `PLOTS` names all."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tpbench.report.analysis.comparison import value_of
from tpbench.report.analysis.grid import Key, RecordGrid, heading
from tpbench.report.analysis.metrics import TITLES, metric
from tpbench.report.analysis.records import column_label, sort_key, value_text
from tpbench.settings import JobError
from tpbench.workloads.study_data import Panel, Picture, Series

PLOTS = {"time": "time_ms", "device_time": "device_ms", "chained_time": "chained_ms", "memory": "peak_gib"}
"""Every plot by its name on the command line, with its metric by the size of the problem."""


def by_size(grid: RecordGrid, name: str, *, at_two_sizes: bool = False) -> Picture | None:
    """Return a metric: a panel for each world size, a line for each column, and the floor of times.

    `at_two_sizes` leaves out panels in which no column has two sizes. Return None if no cell has the metric.
    """
    shown = metric(name)
    if all(value_of(record, shown) is None for record in grid.records):
        return None
    axis, panels = _size_axis(grid), []
    for title, keys in _size_panels(grid, axis).items():
        lowest = _floors(grid, axis, keys)
        position = {size: index for index, size in enumerate(lowest)}
        lines = []
        for index, column in enumerate(grid.columns):
            cells = [(position[key[axis]], grid.lines[key][index]) for key in keys]
            points = sorted((at, value) for at, record in cells if record and (value := value_of(record, shown)))
            crosses = tuple(at for at, record in cells if record and record["status"] == "oom")
            lines.append(Series(column, tuple(points), crosses=crosses))
        if max(len(line.points) + len(line.crosses) for line in lines) > at_two_sizes:
            floor = tuple((position[size], floor) for size, floor in lowest.items() if floor < math.inf)
            floor = floor if shown.is_time else ()
            panels.append(Panel(title, tuple(lines), floor=floor, categories=tuple(map(value_text, position))))
    y_label = f"{TITLES.get(name, name).lower()} ({shown.unit})"
    x_label = column_label(grid.key_names[axis])
    return Picture(tuple(panels), x_label, y_label, "logarithmic", labels=grid.columns) if panels else None


def _size_axis(grid: RecordGrid) -> int:
    """Return the index of the key along the x axis.

    Use the first key. If every panel would then have a single x value, use the key with the most values in one panel.
    """

    def most_values(axis: int) -> int:
        return max(len({key[axis] for key in keys}) for keys in _size_panels(grid, axis).values())

    return 0 if most_values(0) > 1 else max(grid.independent, key=most_values)


def _size_panels(grid: RecordGrid, axis: int) -> dict[str, list[Key]]:
    """Group the problems by their other keys, under a title of those that vary.

    A key that follows from the name along the axis, such as the layers of a model, makes no panel of its own.
    """
    others = [at for at in grid.independent if at != axis and not grid.follows(at, axis)]
    varying = [at for at in grid.varying if at in others] or others
    panels: dict[str, list[Key]] = {}
    for key in grid.lines:
        title = ", ".join(f"{column_label(grid.key_names[at])} {value_text(key[at])}" for at in varying)
        panels.setdefault(title, []).append(key)
    return panels


def _floors(grid: RecordGrid, axis: int, keys: Sequence[Key]) -> dict[Any, float]:
    """Return the lowest floor of each size along the x axis, in ms: numbers in their order, names by their floor."""
    floors: dict[Any, float] = {}
    for key in keys:
        floors[key[axis]] = min(
            floors.get(key[axis], math.inf), *(record["floor_ms"] or math.inf for record in grid.lines[key] if record)
        )
    named = any(isinstance(size, str) for size in floors)
    ordered = sorted(floors, key=lambda size: ([floors[size]] if named else [], sort_key(size)))
    return {size: floors[size] for size in ordered}


def plot(grids: Sequence[RecordGrid], name: str) -> Picture:
    """Return the plot of the one grid that has it. Raises JobError if none or several grids have it."""
    drawn = [(heading(grid.facts), picture) for grid in grids if (picture := by_size(grid, PLOTS[name]))]
    if not drawn:
        raise JobError(f"these rows have nothing for the plot {name}")
    if len(drawn) > 1:
        headings = "\n".join(f"  {title}" for title, _ in drawn)
        raise JobError(f"the plot {name} shows one of these: choose with --loss, --dtype, --gpu-name ...\n{headings}")
    ((title, picture),) = drawn
    return replace(picture, heading=title)
