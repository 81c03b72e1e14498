"""Grids of records: problems by variants. Tables and plots are made from them; no two different rows are merged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import pandas as pd

from tpbench.job import NOT_IN_KEY
from tpbench.report.comparable import comparable
from tpbench.report.records import (
    MISSING,
    Record,
    column_label,
    is_measurement,
    job_fields,
    problem_identity,
    row_records,
    sort_key,
    value_text,
)
from tpbench.results.cells import newest
from tpbench.results.label import chosen_options
from tpbench.workloads import Pivot, Workload, workloads

Key: TypeAlias = tuple[Any, ...]
_EARLIEST = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class GridRow:
    """One problem: the values of its keys, and a record for each column (None: never run)."""

    key: Key
    records: tuple[Record | None, ...]


def _newest(records: Sequence[Record | None]) -> Record | None:
    """Return the newest measurement, or the newest record if none is a measurement."""
    found = [record for record in records if record]
    return max(found, key=lambda record: (is_measurement(record), record["finished_at"] or _EARLIEST), default=None)


class GridCell(NamedTuple):
    """A record with its place in a grid."""

    key: Key
    column_index: int
    column: str
    record: Record


@dataclass(frozen=True)
class RecordGrid:
    """Records of one workload on one kind of hardware: a row for each problem, a column for each variant."""

    workload: str
    facts: dict[str, str]
    """Values that all records share, by name. They are safe to print."""
    key_names: tuple[str, ...]
    """Fields that are the keys of a row."""
    columns: tuple[str, ...]
    """Names of the columns: a variant and the options that it was run with. They are safe to print."""
    rows: tuple[GridRow, ...]
    derived: frozenset[str] = frozenset()
    """Names among `key_names` whose values follow from other fields."""
    added: frozenset[str] = frozenset()
    """Names among `key_names` that are no part of the problem: they tell rows of one cell apart."""

    @property
    def heading(self) -> str:
        """The facts as one line."""
        return heading(self.facts)

    @cached_property
    def independent(self) -> tuple[int, ...]:
        """Indices of the keys that are not derived."""
        return tuple(at for at, name in enumerate(self.key_names) if name not in self.derived)

    @cached_property
    def varying(self) -> tuple[int, ...]:
        """Indices of the independent keys in which rows differ, or all independent keys if no row differs."""
        return tuple(at for at in self.independent if len({row.key[at] for row in self.rows}) > 1) or self.independent

    @cached_property
    def problems(self) -> RecordGrid:
        """The same grid without added keys: one row for each problem, with the newest record of each column.

        A cell that was measured again with other settings, such as a time budget, makes no other problem.
        """
        if not self.added:
            return self
        kept = [at for at, name in enumerate(self.key_names) if name not in self.added]
        groups: dict[Key, list[GridRow]] = defaultdict(list)
        for row in self.rows:
            groups[tuple(row.key[at] for at in kept)].append(row)
        rows = tuple(
            GridRow(key, tuple(map(_newest, zip(*(row.records for row in alike), strict=True))))
            for key, alike in groups.items()
        )
        names = tuple(self.key_names[at] for at in kept)
        return replace(self, key_names=names, rows=rows, added=frozenset())

    def telling(self, indices: Sequence[int]) -> tuple[int, ...]:
        """Return the keys among these that tell rows apart as well as all of them.

        A key is left out that follows from another one: from a name, such as the layers of a model, or from a number
        that follows from it in turn. Names stay before numbers.
        """
        kept: list[int] = []
        for at in sorted(indices, key=lambda at: not self.is_name(at)):
            if not any(self.follows(at, other) for other in kept):
                kept.append(at)
        return tuple(at for at in indices if at in kept)

    def is_name(self, at: int) -> bool:
        """Return true if the values of a key are words."""
        return any(isinstance(row.key[at], str) for row in self.rows)

    def follows(self, at: int, other: int) -> bool:
        """Return true if each value of the key `other` goes with one value of the key `at`, and not by chance.

        Many tokens go with one distribution by chance; a model has its number of layers. So `other` is a name, or the
        two keys imply each other.
        """
        pairs = {(row.key[at], row.key[other]) for row in self.rows}
        implied, implying = (len({pair[part] for pair in pairs}) == len(pairs) for part in (1, 0))
        return implied and (implying or self.is_name(other))

    def cells(self) -> Iterator[GridCell]:
        """Iterate over the records with their places, problem by problem."""
        for row in self.rows:
            for index, (column, record) in enumerate(zip(self.columns, row.records, strict=True)):
                if record:
                    yield GridCell(row.key, index, column, record)

    def problem_text(self, key: Key, indices: Sequence[int] | None = None) -> str:
        """Return the independent keys of a row as text, or only the keys at `indices`."""
        return " ".join(
            f"{column_label(self.key_names[at])}={value_text(key[at])}" for at in indices or self.independent
        )


@dataclass(frozen=True)
class RecordGrids:
    """All rows of a frame, arranged in grids."""

    grids: tuple[RecordGrid, ...]
    records: tuple[Record, ...]
    """The arranged rows, in the order of the frame."""


def heading(facts: dict[str, str]) -> str:
    """Return facts as one line. Names and kinds stand alone, numbers with their name."""
    bare = {"workload", "device", "hardware", "loss", "dtype"}
    return ", ".join(value if name in bare else f"{name}={value}" for name, value in facts.items())


def arrange_rows(frame: pd.DataFrame, columns: Iterable[str] = (), *, all_rows: bool = False) -> RecordGrids:
    """Arrange the newest row of each cell, or every row, in one grid for each workload and kind of hardware.

    `columns` are the columns that records need besides keys. A field of the problem that varies becomes a key of the
    grid's rows. An option that a variant was run with becomes a column of its own. Rows that still share a cell are
    distinguished by the fields in which their jobs differ. If no field differs, a number counts them from the newest.
    So each row of the frame has exactly one place.
    """
    known = workloads()
    frame = comparable(frame)
    found = row_records(frame if all_rows else newest(frame), columns, known)
    groups: dict[Key, list[Record]] = defaultdict(list)
    for record in found:
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
    return RecordGrids(tuple(_grid(groups[key], known.get(key[0])) for key in ordered), tuple(found))


def _derive(compute: Callable[[Record], Any], record: Record) -> Any:
    try:
        return compute(record)
    except (TypeError, ZeroDivisionError):  # the row lacks a value from which it is computed
        return None


def _grid(found: list[Record], workload: Workload | None) -> RecordGrid:
    pivot = workload.pivot if workload else Pivot()
    problem = (problem_identity(workload) if workload else {"dp_size": 1}) | {"nodes": 1}
    placed = {*pivot.rows, *pivot.sections, *pivot.implied}
    free = {name: default for name, default in problem.items() if name not in placed}
    keys = [*pivot.rows, *(name for name in free if len(_values(found, name)) > 1)]
    facts = {name: value_text(found[0][name]) for name in ("workload", *pivot.sections, "hardware", "device")}
    if found[0]["hardware"] is None:
        facts["hardware"] = "unknown hardware"
    for name, default in free.items():
        for value in _values(found, name) if name not in keys else ():
            if value != default:
                facts[column_label(name)] = value_text(value)
    columns = _columns(found, workload)
    added = _distinguishing_keys(found, keys, columns)
    keys += added
    cells: dict[Key, dict[Key, Record]] = defaultdict(dict)
    for record, column in zip(found, columns, strict=True):
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
        added=frozenset(added),
    )


def _values(found: Iterable[Record], name: str) -> set[Any]:
    """Return the distinct values of a column. A row that was never run may lack it, which is no other value."""
    return {record[name] for record in found} - {None}


def _columns(found: list[Record], workload: Workload | None) -> list[Key]:
    """Return the column of each row: its variant, then (name, value) of its options in declared order."""
    return [(record["variant"], *chosen_options(record, workload)) for record in found]


def _column_order(column: Key, workload: Workload | None) -> Key:
    variant, *options = column
    declared = list(workload.variants) if workload else []
    position = declared.index(variant) if variant in declared else len(declared)
    return (position, sort_key(variant), [(name, sort_key(value)) for name, value in options])


def _column_name(column: Key) -> str:
    variant, *options = column
    return " ".join([value_text(variant), *(f"{column_label(name)}={value_text(value)}" for name, value in options)])


def _distinguishing_keys(found: list[Record], keys: list[str], columns: list[Key]) -> list[str]:
    """Put further keys into the records such that no two share a cell, and return the names of these keys."""
    added: list[str] = []
    differing: set[str] = set()
    for group in _collisions(found, keys, columns):
        jobs = [job_fields(record) for record in group]
        names = {name for job in jobs for name in job} - {*NOT_IN_KEY}
        differing |= {name for name in names if len({job.get(name) for job in jobs}) > 1}
    if differing:
        added = [f"job {name}" for name in sorted(differing)]
        for record in found:
            job = job_fields(record)
            record.update({f"job {name}": job.get(name) for name in differing})
    collisions = _collisions(found, [*keys, *added], columns)
    if collisions:
        for record in found:
            record["run"] = 1
        for group in collisions:
            for count, record in enumerate(reversed(group), start=1):
                record["run"] = count
        added.append("run")
    return added


def _collisions(found: list[Record], keys: list[str], columns: list[Key]) -> list[list[Record]]:
    """Return the groups of records that share a cell."""
    cells: dict[Key, list[Record]] = defaultdict(list)
    for record, column in zip(found, columns, strict=True):
        cells[(*(record[name] for name in keys), column)].append(record)
    return [group for group in cells.values() if len(group) > 1]
