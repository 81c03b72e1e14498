"""Grids of records: problems by variants, from which tables and plots are made. No two different rows are merged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import pandas as pd

from tpbench.job import NOT_IN_KEY
from tpbench.report.analysis.records import (
    Record,
    column_label,
    comparable,
    is_measurement,
    job_fields,
    problem_identity,
    row_records,
    sort_key,
    value_text,
)
from tpbench.results.computed import chosen_options
from tpbench.results.current_rows import newest
from tpbench.tables import MISSING
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
    existing = [record for record in records if record]
    return max(existing, key=lambda record: (is_measurement(record), record["finished_at"] or _EARLIEST), default=None)


class GridCell(NamedTuple):
    """A record with its place in a grid."""

    key: Key
    column_index: int
    column: str
    record: Record

    @property
    def variant(self) -> str:
        """The name of the variant without its options, safe to print."""
        return value_text(self.record["variant"])


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
    tie_breaking_keys: frozenset[str] = frozenset()
    """Names among `key_names` that aren't fields of the problem. They distinguish rows of one cell."""

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
        """The same grid without tie-breaking keys: one row for each problem, with the newest record of each column.

        A cell that was measured again with other settings, such as a time budget, makes no other problem.
        """
        if not self.tie_breaking_keys:
            return self
        kept = [at for at, name in enumerate(self.key_names) if name not in self.tie_breaking_keys]
        groups: dict[Key, list[GridRow]] = defaultdict(list)
        for row in self.rows:
            groups[tuple(row.key[at] for at in kept)].append(row)
        rows = tuple(
            GridRow(key, tuple(map(_newest, zip(*(row.records for row in of_problem), strict=True))))
            for key, of_problem in groups.items()
        )
        names = tuple(self.key_names[at] for at in kept)
        return replace(self, key_names=names, rows=rows, tie_breaking_keys=frozenset())

    def distinguishing_keys(self, indices: Sequence[int]) -> tuple[int, ...]:
        """Return the keys that are needed to tell the rows apart, without those that follow from another of them."""
        return tuple(
            at
            for at in indices
            if not any(self.follows(at, other) and (other < at or not self.follows(other, at)) for other in indices)
        )

    def follows(self, at: int, other: int) -> bool:
        """Return true if the key `other` has names of which each has one value of the key `at`.

        Each model has one number of layers. If each number of tokens has one number of ranks, that may be by chance.
        """
        pairs = {(row.key[at], row.key[other]) for row in self.rows}
        named = at != other and any(isinstance(name, str) for _, name in pairs)
        return named and len({name for _, name in pairs}) == len(pairs)

    def cells(self) -> Iterator[GridCell]:
        """Iterate over the records with their places, problem by problem."""
        for row in self.rows:
            yield from self.cells_of(row)

    def cells_of(self, row: GridRow) -> Iterator[GridCell]:
        """Iterate over the records of one problem with their places."""
        for index, (column, record) in enumerate(zip(self.columns, row.records, strict=True)):
            if record:
                yield GridCell(row.key, index, column, record)

    def measured_cells(self) -> Iterator[tuple[str, GridCell]]:
        """Iterate over the cells that are correct and measurements, each with the name of its problem."""
        return ((self.problem_name(cell.key), cell) for cell in self.cells() if is_measurement(cell.record))

    def problem_name(self, key: Key) -> str:
        """Return the keys of a row that are needed to tell it from the others, as text."""
        return self.problem_text(key, self.distinguishing_keys(self.varying))

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
    records = row_records(frame if all_rows else newest(frame), columns, known)
    groups: dict[Key, list[Record]] = defaultdict(list)
    for record in records:
        workload = known.get(record["workload"])
        pivot = workload.pivot if workload else Pivot()
        for name, compute in pivot.derived.items():
            try:
                record[name] = compute(record)
            except (TypeError, ZeroDivisionError):  # the row lacks a value from which it is computed
                record[name] = None
        names = ("workload", "device", "hardware", *pivot.sections)
        groups[tuple(record[name] for name in names)].append(record)
    positions = {name: position for position, name in enumerate(known)}
    ordered = sorted(
        groups,
        key=lambda key: (positions.get(key[0], len(positions)), key[1] == "cpu", [sort_key(value) for value in key]),
    )
    return RecordGrids(tuple(_grid(groups[key], known.get(key[0])) for key in ordered), tuple(records))


def _grid(records: list[Record], workload: Workload | None) -> RecordGrid:
    facts, keys = _split(records, workload)
    columns = [(record["variant"], *chosen_options(record, workload)) for record in records]
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
        derived=frozenset(workload.pivot.derived if workload else ()),
        tie_breaking_keys=frozenset(tie_breaking),
    )


def _split(records: list[Record], workload: Workload | None) -> tuple[dict[str, str], list[str]]:
    """Return the facts that all rows of a grid share, and the keys that split these rows into problems.

    A field of the problem that varies is a key. Options of a variant split columns instead, and settings of the
    measurement split nothing, unless two rows would share a cell (see `_add_tie_breaking_keys`).
    """
    pivot = workload.pivot if workload else Pivot()
    problem = (problem_identity(workload) if workload else {"dp_size": 1}) | {"nodes": 1}
    placed = {*pivot.rows, *pivot.sections, *pivot.implied}
    free = {name: default for name, default in problem.items() if name not in placed}
    # A row of a cell that was never run may lack a value. That doesn't count as a difference.
    values = {name: {record[name] for record in records} - {None} for name in free}
    facts = {name: value_text(records[0][name]) for name in ("workload", *pivot.sections, "hardware", "device")}
    if records[0]["hardware"] is None:
        facts["hardware"] = "unknown hardware"
    for name, default in free.items():
        if len(values[name]) == 1 and values[name] != {default}:
            facts[column_label(name)] = value_text(*values[name])
    return facts, [*pivot.rows, *(name for name in free if len(values[name]) > 1)]


def _column_order(column: Key, workload: Workload | None) -> Key:
    variant, *options = column
    declared = list(workload.variants) if workload else []
    position = declared.index(variant) if variant in declared else len(declared)
    return (position, sort_key(variant), [(name, sort_key(value)) for name, value in options])


def _column_name(column: Key) -> str:
    variant, *options = column
    return " ".join([value_text(variant), *(f"{column_label(name)}={value_text(value)}" for name, value in options)])


def _add_tie_breaking_keys(records: list[Record], keys: list[str], columns: list[Key]) -> list[str]:
    """Put further keys into the records such that no two share a cell, and return the names of these keys.

    They are the fields in which the jobs of a cell differ and, if some do not differ, a number from the newest.
    """
    jobs = [job_fields(record) for record in records]
    differing: set[str] = set()
    for group in _collisions(records, keys, columns):
        names = {name for at in group for name in jobs[at]} - {*NOT_IN_KEY}
        differing |= {name for name in names if len({jobs[at].get(name) for at in group}) > 1}
    for record, job in zip(records, jobs, strict=True):
        record.update({f"job {name}": job.get(name) for name in differing}, run=1)
    added = [f"job {name}" for name in sorted(differing)]
    collisions = _collisions(records, [*keys, *added], columns)
    for group in collisions:
        for count, at in enumerate(reversed(group), start=1):
            records[at]["run"] = count
    return [*added, "run"] if collisions else added


def _collisions(records: list[Record], keys: list[str], columns: list[Key]) -> list[list[int]]:
    """Return the indices of the records that share a cell, cell by cell."""
    cells: dict[Key, list[int]] = defaultdict(list)
    for at, (record, column) in enumerate(zip(records, columns, strict=True)):
        cells[(*(record[name] for name in keys), column)].append(at)
    return [group for group in cells.values() if len(group) > 1]
