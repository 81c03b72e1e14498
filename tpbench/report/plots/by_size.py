"""A metric by the size of the problem, a panel for each world size: time with its floor, or peak memory."""

from __future__ import annotations

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


def draw(section: Section, name: str, *, floor: bool = False) -> Figure | None:
    """A line for each column of the section's table, or None where no cell has that metric."""
    along = _axis(section)
    panels = {title: rows for title, rows in _panels(section, along).items() if _drawn(rows, name)}
    if not any(_value(record, name) is not None for row in section.rows for record in row.records):
        return None
    shown = metric(name)
    sizes = sorted({row.key[along] for rows in panels.values() for row in rows}, key=order)
    across = min(PER_LINE, len(panels))
    down = -(-len(panels) // across)
    figure = style.new_figure(max(5.2, 3.3 * across), 2.9 * down + 0.35 * -(-len(section.heads) // 3))
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, section, along, sizes, rows, name, floor)
        axes.set_title(title)
        axes.set_xlabel(label(section.names[along]))
    for line in grid:
        line[0].set_ylabel(f"{shown.name} ({shown.unit})")
    low, high = grid.flat[0].get_ylim()
    grid.flat[0].set_ylim(min(low, high / 4), max(high, low * 4))  # room for a tick or two that has a label
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        handles |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


def _axis(section: Section) -> int:
    """The key that runs along the axis: the first, or where that is the same in all rows the one that varies most."""
    values = [{row.key[at] for row in section.rows} for at in range(len(section.names))]
    varying = [len(seen) * (name not in section.derived) for name, seen in zip(section.names, values, strict=True)]
    return 0 if varying[0] > 1 else varying.index(max(varying))


def _panels(section: Section, axis: int) -> dict[str, list[Row]]:
    """The rows by what they have beside the key of the axis, under a title."""
    panels: dict[str, list[Row]] = {}
    for row in sorted(section.rows, key=lambda row: [order(value) for value in row.key]):
        named = [
            (name, value) for at, (name, value) in enumerate(zip(section.names, row.key, strict=True)) if at != axis
        ]
        title = ", ".join(f"{label(name)} {say(value)}" for name, value in named if name not in section.derived)
        panels.setdefault(title, []).append(row)
    return panels


def _drawn(rows: list[Row], name: str) -> bool:
    """Whether there is anything to draw of them."""
    found = [record for row in rows for record in row.records if record]
    return any(record["status"] == "oom" or _value(record, name) is not None for record in found)


def _panel(axes: Axes, section: Section, axis: int, sizes: list[Any], rows: list[Row], name: str, floor: bool) -> None:
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
    axes.set_yscale("log")
    axes.set_xticks(range(len(sizes)), [say(size) for size in sizes])
    axes.set_xlim(-0.3, len(sizes) - 0.7)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.tick_params(axis="y", which="minor", labelsize=6)


def _value(record: Record | None, name: str) -> float | None:
    """The measurement, where there is one and it can stand on a logarithmic axis."""
    if record is None or record["status"] != "ok" or mark(record):
        return None
    value = record[name]
    return float(value) if value is not None and 0 < value < float("inf") else None
