"""Rows into tables: problems by variants, with nothing merged that differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import pandas as pd

from tpbench.report.agreement import disagreements
from tpbench.report.escape import plain
from tpbench.report.metric import Metric, metric
from tpbench.report.records import Record, identity, job_fields, label, order, records, say
from tpbench.report.table import COLD, INTERPRETED, NEVER_RUN, Cell, Failure, Line, Report, Table
from tpbench.results.cells import newest
from tpbench.workloads import Pivot, Workload, workloads

Key: TypeAlias = tuple[Any, ...]


def pivot(frame: pd.DataFrame, metric_name: str = "time_ms", *, all_rows: bool = False) -> Report:
    """The report on `frame`: the newest row of each cell, or every row, as tables by workload and hardware.

    A table's lines are problems and its columns variants. A field of the problem that varies becomes a key of the
    line; an option that a variant was run with becomes a column of its own; rows that still fall on the same cell are
    told apart by what differs in their jobs and, where nothing does, by a number that counts from the newest. So every
    row of the frame is in exactly one cell.
    """
    shown = metric(metric_name)
    known = workloads()
    rows = records(frame if all_rows else newest(frame), metric_name, known)
    sections: dict[Key, list[Record]] = defaultdict(list)
    for row in rows:
        workload = known.get(row["workload"])
        layout = workload.pivot if workload else Pivot()
        for name, compute in layout.derived.items():
            row[name] = _derive(compute, row)
        names = ("workload", "device", "hardware", *layout.sections)
        sections[tuple(row[name] for name in names)].append(row)
    tables, failures = [], []
    for key in sorted(sections, key=lambda key: (key[1] == "cpu", [order(value) for value in key])):
        table, placed = _table(sections[key], known.get(key[0]), shown)
        tables.append(table)
        failures += placed
    warnings = [plain(text, 600) for text in disagreements(rows, known)]
    return Report(shown, tuple(tables), _group(failures), tuple(warnings))


def _derive(compute: Callable[[Record], Any], row: Record) -> Any:
    try:
        return compute(row)
    except (TypeError, ZeroDivisionError):  # the row lacks what it is computed from
        return None


def _table(rows: list[Record], workload: Workload | None, shown: Metric) -> tuple[Table, list[tuple[Cell, str]]]:
    """The table of one section, and its failed cells with their places."""
    layout = workload.pivot if workload else Pivot()
    problem = (identity(workload) if workload else {"dp_size": 1}) | {"nodes": 1}
    free = {name: default for name, default in problem.items() if name not in (*layout.rows, *layout.sections)}
    keys = [*layout.rows, *(name for name in free if len(_values(rows, name)) > 1)]
    facts = {name: say(rows[0][name]) for name in ("workload", *layout.sections, "hardware", "device")}
    if rows[0]["hardware"] is None:
        facts["hardware"] = "unknown hardware"
    for name, default in free.items():
        for value in _values(rows, name) if name not in keys else ():
            if value != default:
                facts[label(name)] = say(value)

    columns = _columns(rows, workload)
    keys += _tell_apart(rows, keys, columns)
    grid: dict[Key, dict[Key, Record]] = defaultdict(dict)
    for row, column in zip(rows, columns, strict=True):
        grid[tuple(row[name] for name in keys)][column] = row
    heads = sorted(set(columns), key=lambda column: _column_order(column, workload))
    lines, failures = [], []
    for key in sorted(grid, key=lambda key: [order(value) for value in key]):
        line = _line(key, [grid[key].get(column) for column in heads], shown)
        lines.append(line)
        named = zip(keys, line.keys, strict=True)
        where = " ".join(f"{label(name)}={text}" for name, text in named if name not in layout.derived)
        failures += [
            (cell, f"{_head(column)} {where}")
            for column, cell in zip(heads, line.cells, strict=True)
            if cell and cell.status != "ok"
        ]
    facts = {name: text for name, text in facts.items() if text != NEVER_RUN}
    return Table(facts, tuple(map(label, keys)), tuple(map(_head, heads)), tuple(lines)), failures


def _values(rows: Iterable[Record], name: str) -> set[Any]:
    """The values that rows have; a row that never ran may not say, and that is no other value."""
    return {row[name] for row in rows} - {None}


def _columns(rows: list[Record], workload: Workload | None) -> list[Key]:
    """Each row's column: its variant, then the options that it was run with, as (name, value) in declared order."""
    neutral: dict[str, Any] = (
        {option.name: option.neutral for option in workload.options} if workload else {"block_cap": "auto"}
    )
    neutral["graph"] = False
    return [
        (row["variant"], *((name, row[name]) for name, plainly in neutral.items() if row[name] not in (None, plainly)))
        for row in rows
    ]


def _column_order(column: Key, workload: Workload | None) -> Key:
    variant, *options = column
    declared = list(workload.variants) if workload else []
    place = declared.index(variant) if variant in declared else len(declared)
    return (place, order(variant), [(name, order(value)) for name, value in options])


def _head(column: Key) -> str:
    variant, *options = column
    return " ".join([say(variant), *(f"{label(name)}={say(value)}" for name, value in options)])


def _tell_apart(rows: list[Record], keys: list[str], columns: list[Key]) -> list[str]:
    """More keys, put into the rows, such that no two rows share a cell."""
    added: list[str] = []
    differing: set[str] = set()
    for group in _crowded(rows, keys, columns):
        jobs = [job_fields(row) for row in group]
        names = {name for job in jobs for name in job}
        differing |= {name for name in names if len({job.get(name) for job in jobs}) > 1}
    if differing:
        added = [f"job {name}" for name in sorted(differing)]
        for row in rows:
            job = job_fields(row)
            row.update({f"job {name}": job.get(name) for name in differing})
    crowded = _crowded(rows, [*keys, *added], columns)
    if crowded:
        for row in rows:
            row["run"] = 1
        for group in crowded:
            for count, row in enumerate(reversed(group), start=1):
                row["run"] = count
        added.append("run")
    return added


def _crowded(rows: list[Record], keys: list[str], columns: list[Key]) -> list[list[Record]]:
    """The groups of rows that share a cell."""
    places: dict[Key, list[Record]] = defaultdict(list)
    for row, column in zip(rows, columns, strict=True):
        places[(*(row[name] for name in keys), column)].append(row)
    return [group for group in places.values() if len(group) > 1]


def _line(key: Key, rows: list[Record | None], shown: Metric) -> Line:
    cells = [_cell(row, shown) if row else None for row in rows]
    measured = [cell for cell in cells if cell and cell.value is not None and cell.status == "ok" and not cell.mark]
    ratios = shown.ratios([cell.value for cell in measured if cell.value is not None])
    ratio = {id(cell): times for cell, times in zip(measured, ratios, strict=True)}
    return Line(
        tuple(map(say, key)),
        tuple(
            cell and Cell(cell.row_id, cell.status, cell.reason, cell.value, ratio.get(id(cell)), cell.mark)
            for cell in cells
        ),
    )


def _cell(row: Record, shown: Metric) -> Cell:
    status = say(row["status"])
    right = status == "ok" or (status == "wrong" and shown.of_wrong)
    cold = row["warmed_up"] is not None and not row["warmed_up"]
    mark = INTERPRETED if row["interpreted"] else COLD if cold else ""
    value = row[shown.name] if right else None
    return Cell(
        row_id=plain(str(row["row_id"])),
        status=status,
        reason=plain(row["reason"] or ""),
        value=None if value is None else float(value),
        mark=mark if right else "",
    )


def _group(failures: list[tuple[Cell, str]]) -> tuple[Failure, ...]:
    """Failed cells with the same status and reason, as one."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell, where in failures:
        alike[cell.status, cell.reason].append(where)
    return tuple(Failure(status, reason, tuple(cells)) for (status, reason), cells in alike.items())
