"""One step of each column of a problem as the profiler recorded it: bars for products, transfers and other kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpbench.report.analysis.grid import RecordGrid
from tpbench.report.analysis.records import Record
from tpbench.report.plots import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("timeline_start_ms", "timeline_ms", "timeline_kind", "timeline_lane")
"""Columns with a value for each interval: start and length in ms, number of its kind, number of its stream."""
KINDS = ("product", "communication", "other")

Cells = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of columns, with their records."""


def draw(grid: RecordGrid) -> Figure | None:
    """Draw the traced cells of one problem. Return None if no cell has a trace."""
    problem, cells = traced_cells(grid)
    return _panels(problem, cells) if cells else None


def traced_cells(grid: RecordGrid) -> tuple[str, list[tuple[str, Record]]]:
    """Return the last of the problems with the most traced cells, and these cells with the names of their columns."""
    problem, most = "", list[tuple[str, Record]]()
    for row in grid.rows:
        cells = zip(grid.columns, row.records, strict=True)
        traced = [(column, record) for column, record in cells if record and _is_traced(record)]
        if traced and len(traced) >= len(most):
            problem, most = grid.problem_text(row.key), traced
    return problem, most


def _is_traced(record: Mapping[str, Any]) -> bool:
    """Return true if the row is correct and has intervals."""
    lengths = record.get(COLUMNS[1])
    return record["status"] == "ok" and lengths is not None and len(lengths) > 0


def _panels(title: str, cells: Cells) -> Figure:
    """Draw a panel for each cell with a line for each stream, all on one time axis."""
    lanes = [1 + int(max(record["timeline_lane"])) for _, record in cells]
    figure = style.new_figure(7.5, 0.9 + sum(0.45 + 0.16 * each for each in lanes))
    heights = [1.5 + 0.5 * each for each in lanes]
    grid = figure.subplots(len(cells), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (column, record), streams in zip(grid, cells, lanes, strict=True):
        starts, lengths, kinds, lane = ([float(each) for each in record[name]] for name in COLUMNS)
        for kind, name in enumerate(KINDS):
            for stream in range(streams):
                spans = [
                    (start, length)
                    for start, length, this, there in zip(starts, lengths, kinds, lane, strict=True)
                    if (this, there) == (kind, stream)
                ]
                colour = style.colour(kind) if kind < 2 else style.INK
                look: dict[str, Any] = {"color": colour, "alpha": 1.0 if kind < 2 else 0.3, "linewidth": 0}
                axes.broken_barh(spans, (stream - 0.4, 0.8), label=name if stream == 0 else None, **look)
        end = max(start + length for start, length in zip(starts, lengths, strict=True))
        axes.set_title(f"{style.short(column)}, {end:.3g} ms", loc="left")
        axes.set_yticks(range(streams), [str(stream) for stream in range(streams)], fontsize=6)
        axes.set_ylim(streams - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
    grid[-1].set_xlabel(f"ms from the start of a step, a line for each stream; {style.short(title, 90)}", fontsize=8)
    style.common_legend(figure, grid[:1], len(KINDS))
    return figure
