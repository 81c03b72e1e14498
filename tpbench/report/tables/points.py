"""Picture of a study: two columns of each cell as a point, in a panel for each problem and number of ranks."""

from __future__ import annotations

import textwrap
from collections import defaultdict

from tpbench.report.grids.grid import GridCell, RecordGrid
from tpbench.report.grids.records import column_label, is_measurement, value_text
from tpbench.workloads import Study
from tpbench.workloads.study_data import Panel, Picture, Series

_LETTERS = 44
"""Letters of a panel's title in one line."""


def points_picture(grid: RecordGrid, study: Study) -> Picture | None:
    """Return the columns `study.axes` of each measured cell as points, or None if no cell has both.

    A panel holds cells that differ only in the keys `study.compared_across`, on equally many ranks. These keys stand
    beside each point.
    """
    if not study.axes:
        return None
    x, y = study.axes
    panels: dict[tuple[int, tuple[object, ...]], list[GridCell]] = defaultdict(list)
    for cell in grid.cells():
        record = cell.record
        if is_measurement(record) and record.get(x) is not None and record.get(y) is not None:
            panels[record["tp_size"] * record["dp_size"], compared_key(grid, study, cell)].append(cell)
    if not panels:
        return None
    beside = " x ".join(column_label(name) for name in grid.key_names if name in study.compared_across)
    drawn = tuple(_panel(grid, study, ranks, cells) for (ranks, _), cells in sorted(panels.items(), key=_by_ranks))
    return Picture(drawn, x + (f" (beside a point: {beside})" if beside else ""), y, ratios=False)


def compared_key(grid: RecordGrid, study: Study, cell: GridCell) -> tuple[object, ...]:
    """Return the keys in which cells must agree to be compared in the study."""
    pairs = zip(grid.key_names, cell.key, strict=True)
    return tuple(value for name, value in pairs if name not in study.compared_across)


def _by_ranks(item: tuple[tuple[int, tuple[object, ...]], list[GridCell]]) -> int:
    return item[0][0]


def _panel(grid: RecordGrid, study: Study, ranks: int, cells: list[GridCell]) -> Panel:
    x, y = study.axes
    facts = zip(grid.key_names, cells[0].key, strict=True)
    title = " ".join(
        f"{column_label(name)}={value_text(value)}" for name, value in facts if name not in study.compared_across
    )
    across = [at for at, name in enumerate(grid.key_names) if name in study.compared_across]
    points: dict[str, list[GridCell]] = defaultdict(list)
    for cell in cells:
        points[cell.column].append(cell)
    series = tuple(
        Series(
            column,
            tuple((float(cell.record[x]), float(cell.record[y])) for cell in found),
            texts=tuple(" x ".join(value_text(cell.key[at]) for at in across) for cell in found),
        )
        for column, found in points.items()
    )
    return Panel(textwrap.fill(f"{title}, {ranks} ranks", _LETTERS), series)
