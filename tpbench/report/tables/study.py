"""Studies of workloads: several numbers of each cell side by side, or tables that the workload computes from rows."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from tpbench.report.grids.arrange import arrange_rows
from tpbench.report.grids.comparable import comparable
from tpbench.report.grids.records import Record
from tpbench.report.tables import writer
from tpbench.report.tables.cell_table import cell_table
from tpbench.report.tables.points import points_picture
from tpbench.results.read import plain_rows
from tpbench.settings import JobError
from tpbench.suggestions import printable, unknown
from tpbench.workloads import Study, workloads
from tpbench.workloads.study_data import Picture, StudyTable


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
        tables = [cell_table(grid, by_workload[grid.workload]) for grid in grids if grid.workload in by_workload]
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
