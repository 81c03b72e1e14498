"""Tables of chosen columns: a line for each cell, with columns of its row and ratios of two columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from tpbench.report.arrange import arrange_rows
from tpbench.report.grids import RecordGrid
from tpbench.report.metric import ratio_text
from tpbench.report.records import MISSING, Record, column_label, mark_meanings, status_marks, value_text
from tpbench.report.study import OF_BEST, compared_with_best, studies, value_of
from tpbench.results.schema import COLUMN_LIST, all_columns
from tpbench.settings import JobError, unknown
from tpbench.workloads import Study, workloads
from tpbench.workloads.study_data import StudyTable


def parse_columns(text: str) -> tuple[str, ...]:
    """Return the names in "peak_gib,time_ms/device_ms". Raises JobError that names an unknown column."""
    names = tuple(text.split(","))
    for name in names:
        for part in name.split("/", 1):
            if part not in all_columns():
                raise JobError(unknown("column", part, all_columns(), COLUMN_LIST))
    return names


def column_tables(
    frame: pd.DataFrame, names: Sequence[str], study: str | None = None, *, all_rows: bool = False
) -> list[StudyTable]:
    """Return a table of the columns `names` for each grid, or only for the workloads of a study.

    With a study, cells are also compared with the best as the study does. Columns that no row of a grid has are left
    out. Raises JobError if there are no rows or none of the columns.
    """
    known = {name: Study("") for name in workloads()} if study is None else studies()[study]
    read = dict.fromkeys(part for name in names for part in name.split("/", 1))
    read |= dict.fromkeys(name for each in known.values() for name in each.best_by)
    grids = [grid for grid in arrange_rows(frame, read, all_rows=all_rows).grids if grid.workload in known]
    if not grids:
        raise JobError(f"no rows for the study {study}, which is of {', '.join(known)}")
    tables = [
        _table(grid, replace(known[grid.workload], columns=filled))
        for grid in grids
        if (filled := _filled(grid, names))
    ]
    if not tables:
        raise JobError(f"these rows have no {' and no '.join(names)}")
    return tables


def _filled(grid: RecordGrid, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names for which some record of the grid has a value."""
    cells = list(grid.cells())
    return tuple(name for name in names if any(_text(name, cell.record) != MISSING for cell in cells))


def _table(grid: RecordGrid, study: Study) -> StudyTable:
    """Return the table of one grid. Keys with one value stand in its heading."""
    values = [{row.key[at] for row in grid.rows} for at in range(len(grid.key_names))]
    shown = [at for at, distinct in enumerate(values) if len(distinct) > 1]
    shared = {
        column_label(name): value_text(*distinct)
        for name, distinct in zip(grid.key_names, values, strict=True)
        if len(distinct) == 1 and distinct != {None}
    }
    cells, compared = list(grid.cells()), compared_with_best(grid, study)
    marks = [status_marks(cell.record, study.columns) for cell in cells]
    statuses = [f"{value_text(cell.record['status'])}{mark}" for cell, mark in zip(cells, marks, strict=True)]
    has_status = set(statuses) != {"ok"}
    rows = [
        (
            *(value_text(cell.key[at]) for at in shown),
            cell.column,
            *((status,) if has_status else ()),
            *compared[at : at + 1],
            *(_text(name, cell.record) for name in study.columns),
        )
        for at, (cell, status) in enumerate(zip(cells, statuses, strict=True))
    ]
    columns = (
        *(column_label(grid.key_names[at]) for at in shown),
        "variant",
        *(("status",) if has_status else ()),
        *((OF_BEST,) if compared else ()),
        *study.columns,
    )
    heading = ", ".join((grid.heading, *(f"{name}={value}" for name, value in shared.items())))
    return StudyTable(heading, columns, tuple(rows), {**grid.facts, **shared}, mark_meanings("".join(marks)))


def _text(name: str, record: Record) -> str:
    """Return a value of a row, or the ratio of two values as "2.00x"."""
    above, _, below = name.partition("/")
    if not below:
        return value_of(name, record)
    try:
        return ratio_text(float(record[above]) / float(record[below]))
    except (TypeError, ValueError, ZeroDivisionError):  # a value is missing, text or 0
        return MISSING
