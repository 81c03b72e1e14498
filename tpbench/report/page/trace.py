"""The picture of traced steps: bars for products, transfers and other kernels."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from tpbench.report.analysis.grid import RecordGrid
from tpbench.report.page.pictures import PageFigure
from tpbench.report.plots.timeline import COLUMNS, KINDS, traced_cells

WIDTH, LANE = 320, 9
CLASSES = ("product", "transfer", "other")
"""CSS class of each of `KINDS`."""


def step_traces(grid: RecordGrid) -> PageFigure | None:
    """Return a panel for each traced cell of one problem, or None if no cell has a trace."""
    problem, cells = traced_cells(grid)
    if not cells:
        return None
    end = max(start + length for _, record in cells for start, length in zip(*_spans(record), strict=True))
    panels = [_panel(column, record, end) for column, record in cells]
    legend = [
        (f'<svg class="key" viewBox="0 0 24 12"><path class="span {name}" d="M2 6h20"/></svg>', kind)
        for kind, name in zip(KINDS, CLASSES, strict=True)
    ]
    note = f"{problem}. All panels have the same time axis, from 0 to {end:.3g} ms, and a line for each stream."
    return PageFigure("A step of one problem, by stream", panels, legend, [note])


def _spans(record: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    return [float(each) for each in record[COLUMNS[0]]], [float(each) for each in record[COLUMNS[1]]]


def _panel(column: str, record: Mapping[str, Any], end: float) -> str:
    starts, lengths = _spans(record)
    lanes = 1 + int(max(record[COLUMNS[3]]))
    paths = dict.fromkeys(CLASSES, "")
    for start, length, kind, lane in zip(starts, lengths, record[COLUMNS[2]], record[COLUMNS[3]], strict=True):
        x, width = WIDTH * start / end, max(0.1, WIDTH * length / end)
        paths[CLASSES[int(kind)]] += f"M{x:.1f} {20 + LANE * int(lane)}h{width:.1f}"
    drawn = "".join(f'<path class="span {name}" d="{path}"/>' for name, path in paths.items() if path)
    length = max(start + span for start, span in zip(starts, lengths, strict=True))
    title = escape(f"{column}, {length:.3g} ms", quote=True)
    size = f'viewBox="0 0 {WIDTH} {20 + LANE * lanes}"'
    return f'<svg {size} role="img" aria-label="{title}"><text class="t" x="0" y="11">{title}</text>{drawn}</svg>'
