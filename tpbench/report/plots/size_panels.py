"""Arrangement of a grid's values by the size of the problem: a panel for each other key. Plots are drawn from it."""

from __future__ import annotations

import math
from typing import Any

from tpbench.report.analysis.grid import GridRow, RecordGrid
from tpbench.report.analysis.records import Record, column_label, is_measurement, sort_key, value_text


def size_axis(grid: RecordGrid) -> int:
    """Return the index of the key along the x axis.

    Use the first key. If every panel would then have a single x value, use the key with the most values in one panel.
    """

    def most_values(axis: int) -> int:
        return max(len({row.key[axis] for row in rows}) for rows in size_panels(grid, axis).values())

    return 0 if most_values(0) > 1 else max(grid.independent, key=most_values)


def size_panels(grid: RecordGrid, axis: int, *, short: bool = False) -> dict[str, list[GridRow]]:
    """Group the rows by their other keys, under a title of those that vary. `short`: of those that suffice.

    A key that follows from the name along the axis, such as the layers of a model, makes no panel of its own.
    """
    others = [at for at in grid.independent if at != axis and not grid.follows(at, axis)]
    varying = [at for at in grid.varying if at in others] or others
    varying = list(grid.distinguishing_keys(varying)) if short else varying
    panels: dict[str, list[GridRow]] = {}
    for row in sorted(grid.rows, key=lambda row: [sort_key(value) for value in row.key]):
        title = ", ".join(f"{column_label(grid.key_names[at])} {value_text(row.key[at])}" for at in varying)
        panels.setdefault(title, []).append(row)
    return panels


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
