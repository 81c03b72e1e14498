"""Arrange rows in grids of problems by variants. No two different rows are merged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from tpbench.job import NOT_IN_KEY
from tpbench.report.grids.comparable import comparable, with_bound
from tpbench.report.grids.grid import GridRow, Key, RecordGrid, RecordGrids
from tpbench.report.grids.records import (
    MISSING,
    Record,
    column_label,
    job_fields,
    problem_identity,
    row_records,
    sort_key,
    value_text,
)
from tpbench.results.computed import chosen_options
from tpbench.results.current_rows import newest
from tpbench.workloads import Pivot, Workload, workloads


def arrange_rows(frame: pd.DataFrame, columns: Iterable[str] = (), *, all_rows: bool = False) -> RecordGrids:
    """Arrange the newest row of each cell, or every row, in one grid for each workload and kind of hardware.

    `columns` are the columns that records need besides keys. A field of the problem that varies becomes a key of the
    grid's rows. An option that a variant was run with becomes a column of its own. Rows that still share a cell are
    distinguished by the fields in which their jobs differ. If no field differs, a number counts them from the newest.
    So each row of the frame has exactly one place.
    """
    known = workloads()
    frame = with_bound(comparable(frame))
    records = row_records(frame if all_rows else newest(frame), columns, known)
    groups: dict[Key, list[Record]] = defaultdict(list)
    for record in records:
        workload = known.get(record["workload"])
        pivot = workload.pivot if workload else Pivot()
        for name, compute in pivot.derived.items():
            record[name] = _derive(compute, record)
        names = ("workload", "device", "hardware", *pivot.sections)
        groups[tuple(record[name] for name in names)].append(record)
    positions = {name: position for position, name in enumerate(known)}
    ordered = sorted(
        groups,
        key=lambda key: (positions.get(key[0], len(positions)), key[1] == "cpu", [sort_key(value) for value in key]),
    )
    return RecordGrids(tuple(_grid(groups[key], known.get(key[0])) for key in ordered), tuple(records))


def _derive(compute: Callable[[Record], Any], record: Record) -> Any:
    try:
        return compute(record)
    except (TypeError, ZeroDivisionError):  # the row lacks a value from which it is computed
        return None


def _grid(records: list[Record], workload: Workload | None) -> RecordGrid:
    pivot = workload.pivot if workload else Pivot()
    problem = (problem_identity(workload) if workload else {"dp_size": 1}) | {"nodes": 1}
    placed = {*pivot.rows, *pivot.sections, *pivot.implied}
    free = {name: default for name, default in problem.items() if name not in placed}
    keys = [*pivot.rows, *(name for name in free if len(_values(records, name)) > 1)]
    facts = {name: value_text(records[0][name]) for name in ("workload", *pivot.sections, "hardware", "device")}
    if records[0]["hardware"] is None:
        facts["hardware"] = "unknown hardware"
    for name, default in free.items():
        for value in _values(records, name) if name not in keys else ():
            if value != default:
                facts[column_label(name)] = value_text(value)
    columns = _columns(records, workload)
    tie_breaking = _add_tie_breaking_keys(records, keys, columns)
    keys += tie_breaking
    cells: dict[Key, dict[Key, Record]] = defaultdict(dict)
    for record, column in zip(records, columns, strict=True):
        cells[tuple(record[name] for name in keys)][column] = record
    ordered = sorted(set(columns), key=lambda column: _column_order(column, workload))
    return RecordGrid(
        workload=facts["workload"],
        facts={name: text for name, text in facts.items() if text != MISSING},
        key_names=tuple(keys),
        columns=tuple(map(_column_name, ordered)),
        rows=tuple(
            GridRow(key, tuple(cells[key].get(column) for column in ordered))
            for key in sorted(cells, key=lambda key: [sort_key(value) for value in key])
        ),
        derived=frozenset(pivot.derived),
        tie_breaking_keys=frozenset(tie_breaking),
    )


def _values(records: Iterable[Record], name: str) -> set[Any]:
    """Return the distinct values of a column. A row that was never run may lack it, which is no other value."""
    return {record[name] for record in records} - {None}


def _columns(records: list[Record], workload: Workload | None) -> list[Key]:
    """Return the column of each row: its variant, then (name, value) of its options in declared order."""
    return [(record["variant"], *chosen_options(record, workload)) for record in records]


def _column_order(column: Key, workload: Workload | None) -> Key:
    variant, *options = column
    declared = list(workload.variants) if workload else []
    position = declared.index(variant) if variant in declared else len(declared)
    return (position, sort_key(variant), [(name, sort_key(value)) for name, value in options])


def _column_name(column: Key) -> str:
    variant, *options = column
    return " ".join([value_text(variant), *(f"{column_label(name)}={value_text(value)}" for name, value in options)])


def _add_tie_breaking_keys(records: list[Record], keys: list[str], columns: list[Key]) -> list[str]:
    """Put further keys into the records such that no two share a cell, and return the names of these keys."""
    added: list[str] = []
    differing: set[str] = set()
    for group in _collisions(records, keys, columns):
        jobs = [job_fields(record) for record in group]
        names = {name for job in jobs for name in job} - {*NOT_IN_KEY}
        differing |= {name for name in names if len({job.get(name) for job in jobs}) > 1}
    if differing:
        added = [f"job {name}" for name in sorted(differing)]
        for record in records:
            job = job_fields(record)
            record.update({f"job {name}": job.get(name) for name in differing})
    collisions = _collisions(records, [*keys, *added], columns)
    if collisions:
        for record in records:
            record["run"] = 1
        for group in collisions:
            for count, record in enumerate(reversed(group), start=1):
                record["run"] = count
        added.append("run")
    return added


def _collisions(records: list[Record], keys: list[str], columns: list[Key]) -> list[list[Record]]:
    """Return the groups of records that share a cell."""
    cells: dict[Key, list[Record]] = defaultdict(list)
    for record, column in zip(records, columns, strict=True):
        cells[(*(record[name] for name in keys), column)].append(record)
    return [group for group in cells.values() if len(group) > 1]
