"""Tables with a line for each cell of a grid: columns of its row, ratios of two columns, distance to the best."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tpbench.report.grids.grid import RecordGrid
from tpbench.report.grids.records import (
    MISSING,
    Record,
    column_label,
    is_measurement,
    mark_meanings,
    status_marks,
    value_text,
)
from tpbench.report.numbers.metric import metric, number, ratio_text
from tpbench.report.tables.points import compared_key
from tpbench.workloads import Study, workloads
from tpbench.workloads.study_data import StudyTable

OF_BEST = "of best"
"""Name of the column that compares a cell with the best."""


@functools.cache
def percentage_columns() -> frozenset[str]:
    """Return the columns that are written as percentages."""
    return frozenset({"fraction_of_floor"}.union(*(each.percentages for each in workloads().values())))


def cell_table(grid: RecordGrid, study: Study, *, compact: bool = False) -> StudyTable:
    """Return the table of a grid with the columns of the study that some row has.

    `compact`: keys with one value stand in the heading, and the column of the status is left out if all cells are ok.
    """
    cells, compared, shown = list(grid.cells()), compared_with_best(grid, study), filled_columns(grid, study.columns)
    values = [{row.key[at] for row in grid.rows} for at in range(len(grid.key_names))]
    keys = [at for at, distinct in enumerate(values) if len(distinct) > 1 or not compact]
    shared = {
        column_label(name): value_text(*distinct)
        for name, distinct in zip(grid.key_names, values, strict=True)
        if compact and len(distinct) == 1 and distinct != {None}
    }
    marks = [status_marks(cell.record, shown) for cell in cells]
    statuses = [f"{value_text(cell.record['status'])}{mark}" for cell, mark in zip(cells, marks, strict=True)]
    has_status = not compact or set(statuses) != {"ok"}
    rows = [
        (
            *(value_text(cell.key[at]) for at in keys),
            cell.column,
            *((status,) if has_status else ()),
            *compared[at : at + 1],
            *(cell_text(name, cell.record) for name in shown),
        )
        for at, (cell, status) in enumerate(zip(cells, statuses, strict=True))
    ]
    columns = (
        *(column_label(grid.key_names[at]) for at in keys),
        "variant",
        *(("status",) if has_status else ()),
        *((OF_BEST,) if compared else ()),
        *shown,
    )
    heading = ", ".join((grid.heading, *(f"{name}={value}" for name, value in shared.items())))
    return StudyTable(heading, columns, tuple(rows), {**grid.facts, **shared}, mark_meanings("".join(marks)))


def filled_columns(grid: RecordGrid, names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns, or ratios of two, that some record of the grid has."""
    cells = list(grid.cells())
    return tuple(name for name in names if any(cell_text(name, cell.record) != MISSING for cell in cells))


def cell_text(name: str, record: Record) -> str:
    """Return a value of a row as a table prints it, or the ratio of two values, named A/B, as "2.00x"."""
    above, _, below = name.partition("/")
    if below:
        try:
            return ratio_text(float(record[above]) / float(record[below]))
        except (TypeError, ValueError, ZeroDivisionError):  # a value is missing, text or 0
            return MISSING
    value = record.get(name)
    if isinstance(value, float):
        return f"{100 * value:.1f}%" if name in percentage_columns() else number(value)
    return value_text(value)


def compared_with_best(grid: RecordGrid, study: Study) -> list[str]:
    """Return for each cell how many times worse it is than the best with which it is compared.

    Only correct and measured cells are compared. The list is empty if the study has no column to compare.
    """
    cells = list(grid.cells())
    name = next((each for each in study.best_by if any(cell.record.get(each) is not None for cell in cells)), None)
    if name is None:
        return []
    groups: dict[tuple[object, ...], list[int]] = {}
    for at, cell in enumerate(cells):
        if is_measurement(cell.record) and cell.record.get(name) is not None:
            groups.setdefault(compared_key(grid, study, cell), []).append(at)
    compared = [MISSING] * len(cells)
    for group in groups.values():
        ratios = metric(name).ratios([float(cells[at].record[name]) for at in group])
        for at, ratio in zip(group, ratios, strict=True):
            compared[at] = MISSING if ratio is None else ratio_text(ratio)
    return compared
