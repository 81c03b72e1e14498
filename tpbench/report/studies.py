"""Tables with a line for each cell: chosen columns or a study, which a workload may compute itself (`Study.module`)."""

import importlib
import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from tpbench.report.analysis import row_values
from tpbench.report.analysis.comparison import ratios_to_best
from tpbench.report.analysis.grid import RecordGrid, arrange_rows, disagreements, heading, row_records
from tpbench.report.analysis.row_values import Record, column_label
from tpbench.report.pivot import FAILED
from tpbench.results.current_rows import newest
from tpbench.results.schema import COLUMN_LIST, all_columns
from tpbench.settings import JobError
from tpbench.suggestions import number, ratio_text, unknown
from tpbench.tables import MISSING, UNDECIDED, Document, Table, TableCell, number_cell, short_text, value_cell
from tpbench.workloads import Study, workloads
from tpbench.workloads.study_data import Panel, Picture, Series


def studies() -> dict[str, dict[str, Study]]:
    """Return every study by name and workload."""
    by_name: dict[str, dict[str, Study]] = defaultdict(dict)
    for workload in workloads().values():
        for name, study in workload.studies.items():
            by_name[name][workload.name] = study
    return by_name


def study_document(frame: pd.DataFrame, study: str | None, columns: Sequence[str] = ()) -> Document:
    """Return the tables of a study, or of chosen columns, as A or the ratio A/B. Raises JobError if there is none."""
    known = {*all_columns(), *frame.columns}  # a row may have a field that its operation has no more
    for part in itertools.chain.from_iterable(name.split("/", 1) for name in columns):
        if part not in known:
            raise JobError(unknown("column", part, known, COLUMN_LIST))
    by_workload = dict.fromkeys(workloads(), Study("")) if study is None else studies()[study]
    if study is not None:
        frame = frame[frame["workload"].isin(by_workload)]
        frame = frame.dropna(subset=[*{declared.needs for declared in by_workload.values() if declared.needs}])
    computed = [] if columns else _computed(frame, by_workload)
    tables = [table for module, rows in computed for table in module.tables(rows)]
    for grid in arrange_rows(frame) if not computed else ():
        workload = str(grid.facts["workload"])
        if declared := by_workload.get(workload):
            names = columns or workloads()[workload].study_columns(str(study))
            tables += filter(None, [cell_table(grid, declared, names)])
    if len(frame) and columns and not tables:
        raise JobError(f"these rows have no {' and no '.join(columns)}")
    count = int(frame["interpreted"].eq(True).sum()) if computed else 0
    left_out = [f"without the rows of Triton's interpreter, which measure nothing: {count}"] if count else []
    if not tables:
        why = "no rows" if frame.empty else "these rows do not suffice"
        raise JobError(", ".join((f"{why} for the study {study}, which is of {', '.join(by_workload)}", *left_out)))
    return Document(tables, warnings=[*disagreements(row_records(newest(frame))), *left_out])


def _computed(frame: pd.DataFrame, by_workload: dict[str, Study]) -> list[tuple[Any, list[Record]]]:
    """Return the module of each workload that computes the study, and its correct rows. Their texts are printable."""
    measured = [row for row in row_records(frame) if row["status"] == "ok" and not row["interpreted"]]
    for row in measured:
        row.update({name: short_text(value, 200) for name, value in row.items() if isinstance(value, str)})
    return [
        (importlib.import_module(study.module), [row for row in measured if row["workload"] == workload])
        for workload, study in by_workload.items()
        if study.module
    ]


def cell_table(grid: RecordGrid, study: Study, names: Sequence[str]) -> Table | None:
    """Return a line for each cell of a grid with the columns that some row has, or None if no row has any of them."""
    lines, facts, keys = grid.records, dict[str, Any](grid.facts), dict[str, list[TableCell]]()
    cells = {name: [column_cell(name, record) for record in lines] for name in names}
    filled = {name: column for name, column in cells.items() if any(cell.text != MISSING for cell in column)}
    for at, name in enumerate(grid.key_names):
        values = {record.key[at] for record in lines}
        if len(values) > 1:
            keys[column_label(name)] = [value_cell(record.key[at]) for record in lines]
        elif values != {None}:
            facts[column_label(name)] = value_cell(*values).value
    keys["variant"] = [TableCell(record.column) for record in lines]
    columns = {"status": [_status_cell(record, [*filled]) for record in lines]} | compared_with_best(grid, study)
    statuses = {cell.text for cell in columns["status"]}
    notes = row_values.mark_meanings("".join(sorted(statuses)))
    if len(statuses) == 1 and statuses.pop().startswith("ok"):
        del columns["status"]
        notes = [f"All cells: {note}" for note in notes]
    notes += row_values.mark_meanings("".join(cell.text for cell in columns.get("of best", ())))
    columns |= {name: column for name, column in filled.items() if name != "status"}
    rows = [*zip(*keys.values(), *columns.values(), strict=True)]
    return Table(heading(facts), [*keys, *columns], rows, facts, notes, keys=len(keys)) if filled else None


def _status_cell(record: Record, names: Sequence[str]) -> TableCell:
    """Return the status of a row, with the marks that hold beside these columns if it is ok."""
    status = value_cell(record["status"]).text
    mark = row_values.marks(record, names) if status == "ok" else ""
    return TableCell(status + mark, status, FAILED.get(status, ""), note=", ".join(row_values.mark_words(mark)))


def column_cell(name: str, record: Record) -> TableCell:
    """Return a value of a row, or the ratio of two values, named A/B, as "2.00x"."""
    above, _, below = name.partition("/")
    if below:
        try:
            return number_cell(float(record[above]) / float(record[below]), ratio_text)
        except (TypeError, ValueError, ZeroDivisionError):  # a value is missing, text or 0
            return TableCell(MISSING)
    value = record[name]
    if isinstance(value, np.ndarray):
        return TableCell(short_text(", ".join(map(number, value)), 60))
    if isinstance(value, float):
        column = all_columns().get(name)
        return TableCell(f"{100 * value:.1f}%" if column and column.percent else number(value), value)
    return value_cell(value)


def compared_with_best(grid: RecordGrid, study: Study) -> dict[str, list[TableCell]]:
    """Return a column that says how many times worse than the best each cell is, if the study compares cells."""
    name = next((name for name in study.best_by if any(record[name] is not None for record in grid.records)), None)
    if name is None:
        return {}
    groups: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in grid.records:
        pairs = zip(grid.key_names, record.key, strict=True)
        groups[tuple(value for key, value in pairs if key not in study.compared_across)].append(record)
    cells: dict[int, TableCell] = {}
    for group in groups.values():
        for record, ratio in zip(group, ratios_to_best(group, row_values.metric(name)), strict=True):
            mark = UNDECIDED if ratio and not ratio.decided else ""
            cells[id(record)] = number_cell(ratio and ratio.value, ratio_text, mark)
    return {"of best": [cells[id(record)] for record in grid.records]}


def study_picture(frame: pd.DataFrame, name: str) -> Picture:
    """Return the picture of a study. Raises JobError if the study or these rows have none."""
    by_workload = studies()[name]
    if not any(study.module or study.axes for study in by_workload.values()):
        raise JobError(f"the study {name} has no picture: choose --format text, markdown or csv")
    pictures = [module.picture(rows) for module, rows in _computed(frame, by_workload) if hasattr(module, "picture")]
    for grid in arrange_rows(frame):
        if (study := by_workload.get(str(grid.facts["workload"]))) and study.axes:
            pictures.append(_points(grid, study))
    picture: Picture | None = next(filter(None, pictures), None)
    if picture is None:
        raise JobError(f"these rows have nothing to draw for the study {name}")
    return picture


def _points(grid: RecordGrid, study: Study) -> Picture | None:
    """Return `study.axes` of each measured cell as points: a panel for each problem and number of ranks."""
    across = [at for at, name in enumerate(grid.key_names) if name in study.compared_across]
    others = [at for at in range(len(grid.key_names)) if at not in across]
    options = re.compile(rf" (?:{'|'.join(study.compared_across)})=\S+")
    panels: dict[tuple[int, str], dict[str, list[tuple[tuple[float, float], str]]]] = {}
    for record in grid.records:
        x, y = (record[name] for name in study.axes)
        if row_values.is_measurement(record) and x is not None and y is not None:
            place = record["tp_size"] * record["dp_size"], grid.problem_text(record.key, others)
            points = panels.setdefault(place, {}).setdefault(options.sub("", record.column), [])
            points.append(((float(x), float(y)), " x ".join(value_cell(record.key[at]).text for at in across)))
    drawn = []
    for (ranks, problem), by_column in sorted(panels.items(), key=lambda item: item[0][0]):
        ordered = {column: zip(*sorted(points), strict=True) for column, points in by_column.items()}
        series = tuple(Series(column, points, texts=texts) for column, (points, texts) in ordered.items())
        drawn.append(Panel(f"{problem}, {ranks} ranks", series))
    beside = " x ".join(column_label(grid.key_names[at]) for at in across)
    x_label = study.axes[0] + (f" (beside a point: {beside})" if beside else "")
    return Picture(tuple(drawn), x_label, study.axes[1], "from zero") if drawn else None
