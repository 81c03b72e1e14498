"""Studies of workloads: several numbers of each cell side by side, or tables that the workload computes from rows."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from tpbench.report import writer
from tpbench.report.arrange import arrange_rows
from tpbench.report.comparable import comparable
from tpbench.report.grids import RecordGrid
from tpbench.report.metric import metric, number, ratio_text
from tpbench.report.points import compared_key, points_picture
from tpbench.report.records import (
    MISSING,
    Record,
    column_label,
    is_measurement,
    mark_meanings,
    status_marks,
    value_text,
)
from tpbench.results.plain import plain_rows
from tpbench.results.printable import printable
from tpbench.settings import JobError, unknown
from tpbench.workloads import Study, workloads
from tpbench.workloads.study_data import Picture, StudyTable

OF_BEST = "of best"
"""Name of the column that compares a cell with the best."""


@functools.cache
def percentage_columns() -> frozenset[str]:
    """Return the columns that are written as percentages."""
    return frozenset({"fraction_of_floor"}.union(*(each.percentages for each in workloads().values())))


def studies() -> dict[str, dict[str, Study]]:
    """Return every study by name and workload."""
    found: dict[str, dict[str, Study]] = {}
    for workload in workloads().values():
        for name, study in workload.studies.items():
            found.setdefault(name, {})[workload.name] = study
    return found


def check_study(name: str) -> None:
    """Raise JobError that lists the valid names if there is no such study."""
    if name not in studies():
        raise JobError(unknown("study", name, studies()))


def study_tables(frame: pd.DataFrame, name: str, *, all_rows: bool = False) -> list[StudyTable]:
    """Return the tables of a study. Raises JobError if it has no rows."""
    by_workload = studies()[name]
    computed = _computed(frame, by_workload)
    tables = [_printable(table) for module, rows in computed for table in module.tables(rows)]
    if not computed:
        columns = dict.fromkeys(each for study in by_workload.values() for each in (*study.columns, *study.best_by))
        grids = arrange_rows(frame, columns, all_rows=all_rows).grids
        tables = [grid_table(grid, by_workload[grid.workload]) for grid in grids if grid.workload in by_workload]
    if not tables:
        raise JobError(f"no rows for the study {name}, which is of {', '.join(by_workload)}")
    return tables


def study_picture(frame: pd.DataFrame, name: str) -> Picture:
    """Return the picture of a study. Raises JobError if the study or these rows have none."""
    by_workload = studies()[name]
    if not any(study.module or study.axes for study in by_workload.values()):
        raise JobError(f"the study {name} has no picture: choose --format text, markdown or csv")
    columns = dict.fromkeys(each for study in by_workload.values() for each in study.axes)
    for grid in arrange_rows(frame, columns).grids if columns else ():
        if grid.workload in by_workload and (points := points_picture(grid, by_workload[grid.workload])):
            return points
    for module, rows in _computed(frame, by_workload):
        picture: Picture | None = module.picture(rows)
        if picture is not None:
            return picture
    raise JobError(f"these rows have nothing to draw for the study {name}")


def _computed(frame: pd.DataFrame, by_workload: dict[str, Study]) -> list[tuple[Any, list[Record]]]:
    """Return the module and the rows of each workload that computes the study itself."""
    frame = comparable(frame)
    return [
        (importlib.import_module(study.module), plain_rows(frame[frame["workload"] == workload]))
        for workload, study in by_workload.items()
        if study.module
    ]


def _printable(table: StudyTable) -> StudyTable:
    """Make the texts of a computed table safe to print."""
    return replace(
        table,
        heading=printable(table.heading, 400),
        columns=tuple(map(printable, table.columns)),
        rows=tuple(tuple(map(printable, row)) for row in table.rows),
        facts={name: printable(value) for name, value in table.facts.items()},
        notes=tuple(printable(note, 400) for note in table.notes),
    )


def grid_table(grid: RecordGrid, study: Study) -> StudyTable:
    """Return a line for each cell of a grid, with the columns of the study."""
    shown, compared = filled_columns(grid, study), compared_with_best(grid, study)
    rows, marks = [], ""
    for at, cell in enumerate(grid.cells()):
        mark = status_marks(cell.record, shown)
        marks += mark
        numbers = [value_of(name, cell.record) for name in shown]
        status = f"{value_text(cell.record['status'])}{mark}"
        rows.append((*map(value_text, cell.key), cell.column, status, *compared[at : at + 1], *numbers))
    columns = (*map(column_label, grid.key_names), "variant", "status", *([OF_BEST] if compared else ()), *shown)
    return StudyTable(grid.heading, columns, tuple(rows), grid.facts, mark_meanings(marks))


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


def filled_columns(grid: RecordGrid, study: Study) -> tuple[str, ...]:
    """Return the columns of the study for which some record has a value."""
    records = [cell.record for cell in grid.cells()]
    return tuple(name for name in study.columns if any(record.get(name) is not None for record in records))


def value_of(name: str, record: Record) -> str:
    """Return a value of a row as a table prints it."""
    value = record.get(name)
    if isinstance(value, float):
        return f"{100 * value:.1f}%" if name in percentage_columns() else number(value)
    return value_text(value)


def study_document(tables: Sequence[StudyTable], warnings: Sequence[str] = ()) -> writer.TextDocument:
    """Return the tables of a study for the writer of text and Markdown."""
    return writer.TextDocument(
        [writer.TextTable(table.columns, table.rows, table.heading, table.notes) for table in tables],
        notes=writer.warning_notes(warnings),
    )


def study_csv(tables: Sequence[StudyTable], warnings: Sequence[str] = ()) -> str:
    """Return one CSV table of all tables of a study. Warnings are no part of it: the command prints them."""
    columns = list(dict.fromkeys(name for table in tables for name in (*table.facts, *table.columns)))
    named = [{**table.facts, **dict(zip(table.columns, row, strict=True))} for table in tables for row in table.rows]
    return writer.as_csv(columns, [[row.get(name) for name in columns] for row in named])
