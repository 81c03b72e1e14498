"""A metric by the size of the problem, a panel for each world size: time with its floor, or peak memory."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from tpbench.report.layout import Row, Section
from tpbench.report.metric import metric
from tpbench.report.pivot import mark
from tpbench.report.plots import style
from tpbench.report.records import Record, label, order, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PER_LINE = 3
INCH_PER_LETTER = 0.075
"""Of a tick's or a title's text."""
PANEL_INCHES = 3.3


def draw(section: Section, name: str, *, floor: bool = False) -> Figure | None:
    """A line for each column of the section's table, or None where no cell has that metric."""
    along = _axis(section)
    panels = {title: rows for title, rows in _panels(section, along).items() if _drawn(rows, name)}
    if not any(_value(record, name) is not None for row in section.rows for record in row.records):
        return None
    shown = metric(name)
    across = min(PER_LINE, len(panels))
    down = -(-len(panels) // across)
    width = max(5.2, PANEL_INCHES * across)
    texts = [style.short(head) for head in section.heads]
    columns = style.legend_columns(texts, width)
    figure = style.new_figure(width, 2.9 * down + 0.2 * -(-len(texts) // columns))
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    letters = int(width / across / INCH_PER_LETTER) - 6
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, section, along, rows, name, floor, letters)
        axes.set_title(textwrap.fill(title, letters))
        axes.set_xlabel(label(section.names[along]))
    for first, *others in grid:
        first.set_ylabel(f"{shown.name} ({shown.unit})")
        first.tick_params(axis="y", which="minor", labelsize=6)
        for axes in others:  # which have no labels: marks without any are not worth their time
            axes.tick_params(axis="y", which="minor", left=False)
    grid.flat[0].set_yscale("log", subs=(2, 5))  # all share it, and setting it for one sets it for each
    grid.flat[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    grid.flat[0].yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    low, high = grid.flat[0].get_ylim()
    grid.flat[0].set_ylim(min(low, high / 4), max(high, low * 4))  # room for a tick or two that has a label
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        handles |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
    return figure


def _axis(section: Section) -> int:
    """The key that runs along the axis: the first, or where no panel would have two values of it, as where other keys
    change with it, the one of which a panel has most."""

    def most(axis: int) -> int:
        return max(len({row.key[axis] for row in rows}) for rows in _panels(section, axis).values())

    return 0 if most(0) > 1 else max(section.own, key=most)


def _panels(section: Section, axis: int) -> dict[str, list[Row]]:
    """The rows by what they have beside the key of the axis, under a title: of several, what tells them apart."""
    others = [at for at in section.own if at != axis]
    telling = [at for at in section.telling if at != axis] or others
    panels: dict[str, list[Row]] = {}
    for row in sorted(section.rows, key=lambda row: [order(value) for value in row.key]):
        title = ", ".join(f"{label(section.names[at])} {say(row.key[at])}" for at in telling)
        panels.setdefault(title, []).append(row)
    return panels


def _drawn(rows: list[Row], name: str) -> bool:
    """Whether there is anything to draw of them."""
    found = [record for row in rows for record in row.records if record]
    return any(record["status"] == "oom" or _value(record, name) is not None for record in found)


def _panel(
    axes: Axes, section: Section, axis: int, rows: list[Row], name: str, floor: bool, letters: int
) -> None:  # fmt: skip
    """`letters`: how many of the ticks' text stand side by side."""
    sizes = sorted({row.key[axis] for row in rows}, key=order)
    place = {size: index for index, size in enumerate(sizes)}
    crosses = 0.99
    for index, head in enumerate(section.heads):
        kept = {row.key[axis]: row.records[index] for row in rows}
        points = [(place[size], value) for size, record in kept.items() if (value := _value(record, name)) is not None]
        look: dict[str, Any] = {"color": style.colour(index), "marker": style.marker(index)}
        if points:
            axes.plot(*zip(*sorted(points), strict=True), label=style.short(head), **look)
        short = [place[size] for size, record in kept.items() if record and record["status"] == "oom"]
        if short:
            heights = [crosses] * len(short)
            crosses -= 0.05
            axes.plot(
                short, heights, transform=axes.get_xaxis_transform(), linestyle="", marker="x", clip_on=False,
                color=style.colour(index), label=f"{style.short(head)}: out of memory",
            )  # fmt: skip
    if floor:
        lowest: dict[int, float] = {}
        for row in rows:
            found = [record["floor_ms"] for record in row.records if record and record["floor_ms"]]
            if found:
                lowest[place[row.key[axis]]] = min(found)
        if lowest:
            axes.plot(*zip(*sorted(lowest.items()), strict=True), "--", color=style.ink(), marker="_", label="floor")
    named = [say(size) for size in sizes]
    axes.set_xticks(range(len(sizes)), named)
    if sum(len(text) + 2 for text in named) > letters:
        axes.tick_params(axis="x", rotation=60)
    axes.set_xlim(-0.3, len(sizes) - 0.7)


def _value(record: Record | None, name: str) -> float | None:
    """The measurement, where there is one and it can stand on a logarithmic axis."""
    if record is None or record["status"] != "ok" or mark(record):
        return None
    value = record[name]
    return float(value) if value is not None and 0 < value < float("inf") else None
