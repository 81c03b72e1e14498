"""Tables of the columns, and ratios of two columns, that a user chose: a line for each cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from tpbench.report.grids.arrange import arrange_rows
from tpbench.report.tables.cell_table import cell_table, filled_columns
from tpbench.report.tables.study import studies
from tpbench.results.schema import COLUMN_LIST, all_columns
from tpbench.settings import JobError
from tpbench.suggestions import unknown
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
        cell_table(grid, replace(known[grid.workload], columns=tuple(names)), compact=True)
        for grid in grids
        if filled_columns(grid, names)
    ]
    if not tables:
        raise JobError(f"these rows have no {' and no '.join(names)}")
    return tables
