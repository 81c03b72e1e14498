"""The pictures of a page, made from grids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpbench.report.analysis.grid import GridRow, RecordGrid
from tpbench.report.analysis.metrics import metric, number
from tpbench.report.analysis.records import Record, column_label, sort_key, value_text
from tpbench.report.page.chart import Axis, Line, Panel, logarithmic_axis, marker_svg, panel_svg, share_axis
from tpbench.report.page.column_styles import Look, Looks
from tpbench.report.plots.block_cap import shares
from tpbench.report.plots.size_panels import (
    drawn_value,
    lowest_floors,
    size_axis,
    size_panels,
    size_positions,
)

PANELS = 6
"""Most panels of the one picture that a workload shows unfolded."""
PROBLEMS = 8
"""Most problems in the picture of a grid whose problems have no two sizes."""


@dataclass(frozen=True)
class PageFigure:
    """A picture: panels side by side with one legend."""

    caption: str
    panels: list[str]
    """`svg` elements."""
    legend: list[tuple[str, str]]
    """A key as an `svg` element, and the name of its column."""
    notes: list[str]


def floor_shares(grid: RecordGrid, clock: str, looks: Looks, title: str) -> PageFigure | None:
    """Return the share of the floor that each column reaches, by size, in at most `PANELS` panels."""

    def share(record: Record | None) -> float | None:
        time = drawn_value(record, clock)
        return None if time is None or record is None or not record["floor_ms"] else 100 * record["floor_ms"] / time

    def floor(axis: int, rows: list[GridRow]) -> list[tuple[int, float]]:
        return [(at, 100.0) for at in size_positions(axis, rows).values()]

    panels = _size_panels(grid, share, floor, looks)
    values = _values(panels)
    return _figure(panels, share_axis(values), title, tips=True, most=PANELS) if values else None


def by_size(grid: RecordGrid, name: str, looks: Looks, title: str) -> PageFigure | None:
    """Return a metric by the size of the problem: a panel for each other key, a line for each column.

    Panels in which no line has two points are left out. Returns None if none is left.
    """
    unit = metric(name).unit
    floor = lowest_floors if unit == "ms" else lambda axis, rows: []
    panels = _size_panels(grid, lambda record: drawn_value(record, name), floor, looks)
    values = _values(panels)
    return _figure(panels, logarithmic_axis(values, unit), f"{title} ({unit})") if values else None


def _values(panels: Sequence[Panel]) -> list[float]:
    return [value for panel in panels for line in panel.lines for _, value in line.points]


def _size_panels(
    grid: RecordGrid,
    value_of: Callable[[Record | None], float | None],
    floor_of: Callable[[int, list[GridRow]], list[tuple[int, float]]],
    looks: Looks,
) -> list[Panel]:
    """Return the panels in which some line has two points."""
    axis = size_axis(grid)
    panels = []
    for heading, rows in size_panels(grid, axis, short=True).items():
        position = size_positions(axis, rows)
        floor = floor_of(axis, rows)
        lines = [Line("floor", None, floor)] if floor else []
        for index, column in enumerate(grid.columns):
            cells = [(position[row.key[axis]], row.records[index]) for row in rows]
            points = [(at, value) for at, record in cells if (value := value_of(record)) is not None]
            crosses = [at for at, record in cells if record and record["status"] == "oom"]
            if points or crosses:
                lines.append(Line(column, looks[grid.workload, column], points, crosses))
        categories = list(map(value_text, position))
        panels.append(Panel(heading, categories, lines, column_label(grid.key_names[axis])))
    return [panel for panel in panels if panel.is_drawable]


def by_problem(grid: RecordGrid, name: str, looks: Looks, title: str) -> PageFigure | None:
    """Return one panel with a marker for each cell, or None if no problem has two of them."""
    rows = [row for row in grid.rows if sum(drawn_value(record, name) is not None for record in row.records) > 1]
    rows = rows[-PROBLEMS:]
    if not rows:
        return None
    lines = []
    for index, column in enumerate(grid.columns):
        drawn = [(at, drawn_value(row.records[index], name)) for at, row in enumerate(rows)]
        if points := [(at, value) for at, value in drawn if value is not None]:
            lines.append(Line(column, looks[grid.workload, column], points))
    categories = [grid.problem_name(row.key) for row in rows]
    title_of_panel, labels = ("", categories) if len(rows) > 1 else (categories[0], [""])
    panel = Panel(title_of_panel, labels, lines, "", joined=False)
    values = _values([panel])
    unit = metric(name).unit
    return _figure([panel], logarithmic_axis(values, unit), f"{title} ({unit})", tips=True)


def block_caps(grid: RecordGrid, looks: Looks, title: str) -> PageFigure | None:
    """Return the share of the bandwidth by block cap: a panel for each problem. None: no variant has two caps."""
    problems: dict[str, list[Line]] = defaultdict(list)
    shares_by_line = shares(grid)
    caps = sorted({cap for line in shares_by_line.values() for cap in line}, key=sort_key)
    for (column, problem), line in shares_by_line.items():
        variant = column.split()[0]
        look = looks.get((grid.workload, column)) or looks.get((grid.workload, variant)) or Look(0, 0)
        points = [(caps.index(cap), 100 * share) for cap, share in line.items()]
        problems[problem].append(Line(column, look, points))
    panels = [Panel(problem, caps, lines, "block cap (columns)") for problem, lines in problems.items()]
    values = _values(panels)
    return _figure(panels, share_axis(values), f"{title} (%)") if values else None


def _figure(
    panels: Sequence[Panel], axis: Axis, caption: str, *, tips: bool = False, most: int = 1000
) -> PageFigure | None:
    """Return panels with a common axis, the fullest ones if there are more than `most`."""
    fullest = sorted(panels, key=lambda panel: -sum(len(line.points) for line in panel.lines))[:most]
    shown = [panel for panel in panels if any(panel is each for each in fullest)]
    lines = [line for panel in shown for line in panel.lines]
    legend = {line.name: marker_svg(line.look) for line in lines if line.look}
    if any(line.look is None for line in lines):
        legend["floor"] = '<svg class="key" viewBox="0 0 24 12"><path class="floor" d="M1 6h22"/></svg>'
    notes = []
    below = {line.name: value for line in lines for _, value in line.points if value < axis.low}
    if below:
        named = ", ".join(f"{column} ({number(value)} {axis.unit})" for column, value in below.items())
        notes.append(f"An arrow at the bottom stands for a value far below the axis: {named}.")
    if any(line.crosses for line in lines):
        notes.append("A cross at the top stands for a cell that ran out of memory.")
    if len(panels) > len(shown):
        notes.append(f"{len(panels) - len(shown)} more panels are left out; the folded pictures of times have all.")
    charts = [panel_svg(panel, axis, tips=tips) for panel in shown]
    return PageFigure(caption, charts, [(svg, column) for column, svg in legend.items()], notes)
