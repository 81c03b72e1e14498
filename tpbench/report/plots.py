"""Pictures of the report: metrics of a grid by the size of its problems, and how matplotlib draws panels."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from tpbench import packages
from tpbench.measure.clocks import TIMED
from tpbench.report.analysis.comparison import value_of
from tpbench.report.analysis.grid import Key, RecordGrid, heading, sort_key
from tpbench.report.analysis.row_values import TITLES, column_label, hover_text, interval_of, metric
from tpbench.settings import JobError
from tpbench.tables import short_text, value_text
from tpbench.workloads.study_data import Panel, Picture, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "os^DvP<"  # legends of the page have them, too; 7 of 48 colours, so that the pairs repeat late
COLOURS = {"ink": "#222222", "faint": "#b3b3b3", "ground": "#ffffff"}
"""Colours of `picture.mplstyle` by their names in `page.css`. Both also have those of series."""
HOVER = "hover: "
"""Beginning of the name of a group of an svg whose rest is a title."""
PER_ROW, PANEL_WIDTH, PANEL_HEIGHT = 3, 3.3, 3.2
"""Most panels side by side, and the size of a panel in inches."""
NAME_LETTERS, INCHES_PER_LETTER = 90, 0.075
"""Most letters of a name in the legend, and the width of a letter of a tick's label or of a title."""
PLOTS = {f"{clock.prefix}time": clock.column for clock in TIMED} | {"memory": "peak_gib"}
"""Every plot by its name on the command line, with its metric by the size of the problem."""


def by_size(grid: RecordGrid, name: str, *, for_page: bool = False) -> Picture | None:
    """Return a metric, or None. `for_page` adds error bars and hovers, and leaves out panels of a single size."""
    shown = metric(name)
    if all(value_of(record, shown) is None for record in grid.records):
        return None
    axis, panels = _size_axis(grid), []
    for title, keys in _size_panels(grid, axis).items():
        floors = _floors(grid, axis, keys)
        position = {size: at for at, size in enumerate(floors)}
        lines = []
        for column, records in zip(grid.columns, zip(*(grid.lines[key] for key in keys), strict=True), strict=True):
            cells = [(position[record.key[axis]], record) for record in records if record]
            measured = [cell for cell in cells if value_of(cell[1], shown)]
            measured.sort(key=lambda cell: (cell[0], cell[1][name]))
            points = tuple((at, float(record[name])) for at, record in measured)
            crosses = tuple(at for at, record in cells if record["status"] == "oom")
            hovers = tuple(hover_text(record) for _, record in measured if for_page)
            intervals = tuple(interval_of(record, name) for _, record in measured if for_page)
            lines.append(Series(column, points, crosses=crosses, intervals=intervals, hovers=hovers))
        if max(len(line.points) + len(line.crosses) for line in lines) > for_page:
            floor = [(position[size], floor) for size, floor in floors.items() if floor < math.inf and shown.clock]
            panels.append(Panel(title, tuple(lines), tuple(floor), categories=tuple(map(value_text, position))))
    y_label = f"{TITLES.get(name, name).lower()} ({shown.unit})"
    x_label = column_label(grid.key_names[axis])
    return Picture(tuple(panels), x_label, y_label, "logarithmic", labels=grid.columns) if panels else None


def _size_axis(grid: RecordGrid) -> int:
    """Return the first key, or if every panel would then have a single x, the key with the most values in one panel."""
    axes = (0, *grid.independent)
    most = {at: max(len({key[at] for key in keys}) for keys in _size_panels(grid, at).values()) for at in axes}
    return 0 if most[0] > 1 else max(grid.independent, key=most.__getitem__)


def _size_panels(grid: RecordGrid, axis: int) -> dict[str, list[Key]]:
    """Group the problems by the other keys that vary and don't follow from the axis, as layers do from a model."""
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
        of_line = [record["floor_ms"] or math.inf for record in grid.lines[key] if record]
        floors[key[axis]] = min(floors.get(key[axis], math.inf), *of_line)
    named = any(isinstance(size, str) for size in floors)
    return dict(sorted(floors.items(), key=lambda item: (item[1] if named else 0, sort_key(item[0]))))


def plot(grids: Sequence[RecordGrid], name: str) -> Picture:
    """Return the plot of the one grid that has it. Raises JobError if none or several grids have it."""
    drawn = [replace(picture, heading=heading(grid.facts)) for grid in grids if (picture := by_size(grid, PLOTS[name]))]
    if not drawn:
        raise JobError(f"these rows have nothing for the plot {name}")
    if len(drawn) > 1:
        headings = "\n".join(f"  {picture.heading}" for picture in drawn)
        raise JobError(f"the plot {name} shows one of these: choose with --loss, --dtype, --gpu-name ...\n{headings}")
    return drawn[0]


def render(picture: Picture, name: str, *, inline: bool = False) -> str:
    """Return a picture as an svg file, or `inline` as an element in a page's colours. `name` makes ids unique there."""
    if not packages.installed("matplotlib"):
        raise JobError(f"plots need matplotlib: {packages.install_command('report')}")
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    with matplotlib.rc_context(), resources.as_file(resources.files(__package__) / "page/picture.mplstyle") as style:
        matplotlib.rc_file(style)
        matplotlib.rcParams["svg.hashsalt"] = name
        of_series: Any = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
        colours = COLOURS | {f"s{at}": colour for at, colour in enumerate(of_series)}
        figure = draw_panels(picture, legend=not inline)
        figure.suptitle(picture.heading, fontsize=8)
        canvas: Any = FigureCanvasSVG(figure)  # `savefig` would draw the figure twice, once for its layout
        canvas.print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = out.getvalue()
    if not inline:
        return text
    text = re.sub(r' height="[\d.]+pt"', "", text[text.index("<svg") :], count=1)
    # Identifiers of groups: every figure has the same ones, and nothing refers to them.
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)
    text = re.sub(rf'<g id="{HOVER}([^"]*)">', r"<g><title>\1</title>", text)
    for variable, value in colours.items():
        text = text.replace(value, f"var(--{variable})")
    return text


def draw_panels(picture: Picture, *, legend: bool = True) -> Figure:
    """Draw a picture. Series of one label have one colour and marker. Without a legend it fits a phone."""
    from matplotlib.figure import Figure

    series = {line.label for panel in picture.panels for line in panel.lines}
    labels = picture.labels or sorted(series)
    across = min(PER_ROW, len(picture.panels))
    down = -(-len(picture.panels) // across)
    longest = 0.07 * max((len(_legend_text(label)) for label in series), default=1) + 0.6  # inches
    width = max(5.2, PANEL_WIDTH * across, longest)  # a narrower figure would cut the longest name
    letters = int(width / across / INCHES_PER_LETTER) - 6
    if len(picture.panels) > 1:
        place: Any = "outside lower center"
        columns = max(1, min(3, int(width / longest)))
        height = PANEL_HEIGHT * down + 0.2 * -(-len(series) // columns)
    else:
        place, columns = "outside right center", 1  # below the heading, which may be as wide as the figure
        width, height = (5.2 + longest, max(PANEL_HEIGHT, 0.2 * len(series))) if legend else (3.8, PANEL_HEIGHT)
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes in grid.flat[len(picture.panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, picture.panels, strict=False):
        _draw_panel(axes, panel, labels, joined=picture.scale != "from zero")
        axes.set_title(textwrap.fill(panel.title, letters))
        axes.set_xlabel(picture.x_label)
        _scale_x(axes, picture, panel, letters)
    for first, *others in grid:
        first.set_ylabel(picture.y_label)
        first.tick_params(axis="y", which="minor", labelsize=6)
        for axes in others:  # minor ticks without labels are not worth the time to draw them
            axes.tick_params(axis="y", which="minor", left=False)
    _scale_y(grid[0][0], picture)  # all panels share its y axis
    if legend:
        named = [item for axes in grid.flat for item in zip(*axes.get_legend_handles_labels(), strict=True)]
        handles = {text: handle for handle, text in named}
        figure.legend(handles.values(), handles.keys(), loc=place, ncols=columns)
    return figure


def _legend_text(label: str) -> str:
    """Return a label as a legend has it. matplotlib leaves out those that begin with an underscore."""
    return re.sub("^_", " _", short_text(label, NAME_LETTERS))


def _draw_panel(axes: Axes, panel: Panel, labels: Sequence[str], *, joined: bool) -> None:
    """Draw the series of one panel. The index of a label in `labels` chooses the colour and the marker."""
    cross_height = 0.99
    for line in panel.lines:
        index, label = labels.index(line.label), _legend_text(line.label)
        look: Any = {"color": f"C{index}", "marker": MARKERS[index % len(MARKERS)]}
        if line.points:  # a point on an axis is drawn whole
            look["linestyle"] = "--" if line.dashed else "-" if joined else ""
            axes.plot(*zip(*line.points, strict=True), label=None if line.dashed else label, clip_on=joined, **look)
        if line.intervals:
            ends = zip(*line.intervals, strict=True)
            axes.vlines([x for x, _ in line.points], *ends, color=look["color"], linewidth=2.5)
        for at, text in zip(line.points, line.hovers, strict=False):
            axes.plot(*at, gid=f"{HOVER}{text}", color=look["color"], marker=look["marker"])
        for at, text in zip(line.points, line.texts, strict=False):
            axes.annotate(text, at, (4, 3), textcoords="offset points", fontsize=6)
        if line.crosses:
            axes.plot(
                line.crosses, [cross_height] * len(line.crosses), transform=axes.get_xaxis_transform(), linestyle="",
                marker="x", clip_on=False, color=look["color"], label=f"{label}: out of memory",
            )  # fmt: skip
            cross_height -= 0.05
    if panel.no_gain_to:
        axes.axvspan(panel.lines[0].points[0][0] / 2, panel.no_gain_to, color=COLOURS["ink"], alpha=0.08, linewidth=0)
    if panel.floor:
        axes.plot(*zip(*panel.floor, strict=True), "--", color=COLOURS["ink"], marker="_", label="floor")


def _scale_x(axes: Axes, picture: Picture, panel: Panel, letters: int) -> None:
    """Set the x axis. `letters` is how many letters of labels fit side by side."""
    if panel.categories:
        axes.set_xticks(range(len(panel.categories)), panel.categories)
        axes.set_xlim(-0.3, len(panel.categories) - 0.7)
        if sum(len(text) + 2 for text in panel.categories) > letters:
            axes.tick_params(axis="x", rotation=60)
    elif picture.doubling:
        axes.set_xscale("log", base=2)
        axes.set_xticks(picture.doubling, [f"{value:g}" for value in picture.doubling])
        axes.set_xticks([], minor=True)
        axes.set_xlim(picture.doubling[0] / 1.3, picture.doubling[-1] * 1.3)


def _scale_y(axes: Axes, picture: Picture) -> None:
    if picture.scale == "from zero":
        xs, ys = zip(*(at for panel in picture.panels for line in panel.lines for at in line.points), strict=True)
        axes.set_ylim(0, 1.1 * max(ys))
        for each in axes.figure.axes:
            each.set_xlim(0, 1.15 * max(xs))  # room for the text beside a point
    else:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if picture.scale == "logarithmic":
            low, high = min(low, high / 4), max(high, low * 4)  # room for one or two ticks with a label
        unit = "x" if picture.scale == "ratios" else ""
        digits = "25" if high > 5 * low else "23456789"
        axes.set_yscale("log", subs=[int(digit) for digit in digits])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}{unit}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}{unit}" if f"{value:e}"[0] in digits else "")
        axes.set_ylim(low, high)
        if unit:
            for each in axes.figure.axes:
                each.axhline(1, color=COLOURS["ink"], linewidth=1)
