"""One step of each column of a problem as the profiler saw it: a bar for each product, transfer, and other kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpbench.report.layout import Section
from tpbench.report.plots import style
from tpbench.report.samples import problem_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("timeline_start_ms", "timeline_ms", "timeline_kind", "timeline_lane")
"""Of a row: for each interval its start and length in ms, its kind, and the number of its stream."""
KINDS = ("product", "communication", "other")

Cells = Sequence[tuple[str, Mapping[str, Any]]]
"""Heads and records."""


def draw(section: Section) -> Figure | None:
    """The section's problem with the most traced cells, the last of these; None where there is none."""
    found: list[tuple[str, Cells]] = []
    for row in section.rows:
        all_cells = zip(section.heads, row.records, strict=True)
        traced = [(head, record) for head, record in all_cells if record and is_traced(record)]
        found.append((problem_of(section, row.key), traced))
    problem, cells = max(reversed(found), key=lambda each: len(each[1]), default=("", []))
    return panels(problem, cells) if cells else None


def is_traced(record: Mapping[str, Any]) -> bool:
    """Whether there is something to draw of a row."""
    lengths = record.get(COLUMNS[1])
    return record["status"] == "ok" and lengths is not None and len(lengths) > 0


def panels(title: str, cells: Cells) -> Figure:
    """A panel for each cell with a line for each stream, all on one axis of time."""
    lanes = [1 + int(max(record["timeline_lane"])) for _, record in cells]
    figure = style.new_figure(7.5, 0.9 + sum(0.45 + 0.16 * each for each in lanes))
    heights = [1.5 + 0.5 * each for each in lanes]
    grid = figure.subplots(len(cells), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (head, record), streams in zip(grid, cells, lanes, strict=True):
        starts, lengths, kinds, lane = ([float(each) for each in record[name]] for name in COLUMNS)
        for kind, name in enumerate(KINDS):
            for stream in range(streams):
                spans = [
                    (start, length)
                    for start, length, this, there in zip(starts, lengths, kinds, lane, strict=True)
                    if (this, there) == (kind, stream)
                ]
                paint = style.colour(kind) if kind < 2 else style.ink()
                look: dict[str, Any] = {"color": paint, "alpha": 1.0 if kind < 2 else 0.3, "linewidth": 0}
                axes.broken_barh(spans, (stream - 0.4, 0.8), label=name if stream == 0 else None, **look)
        end = max(start + length for start, length in zip(starts, lengths, strict=True))
        axes.set_title(f"{style.short(head)}, {end:.3g} ms", loc="left")
        axes.set_yticks(range(streams), [str(stream) for stream in range(streams)], fontsize=6)
        axes.set_ylim(streams - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
    grid[-1].set_xlabel(f"ms from the start of a step, a line for each stream; {style.short(title, 90)}", fontsize=8)
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(KINDS))
    return figure
