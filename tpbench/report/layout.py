"""Where each row stands: problems by variants, with nothing merged that differs. Tables and plots are made from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import pandas as pd

from tpbench.job import NOT_IN_KEY
from tpbench.report.records import Record, identity, job_fields, label, order, records, say
from tpbench.report.table import NEVER_RUN, heading
from tpbench.results.cells import newest
from tpbench.workloads import Pivot, Workload, workloads

Key: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """One problem: the values of its keys, and a record for each column (None: never run)."""

    key: Key
    records: tuple[Record | None, ...]


@dataclass(frozen=True)
class Section:
    """What stands together in one table: a workload on one kind of hardware, and what else the workload sets apart."""

    workload: str
    facts: dict[str, str]
    """What holds for all of it, by name, fit to print."""
    names: tuple[str, ...]
    """The fields that are keys of a row."""
    heads: tuple[str, ...]
    """What the columns are called, fit to print: a variant and the options that it was run with."""
    rows: tuple[Row, ...]
    derived: frozenset[str] = frozenset()
    """Those of `names` that follow from others."""

    @property
    def heading(self) -> str:
        """What it is, in a line."""
        return heading(self.facts)

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The places of the keys that do not follow from others."""
        return tuple(at for at, name in enumerate(self.names) if name not in self.derived)

    @cached_property
    def telling(self) -> tuple[int, ...]:
        """Of these the ones in which rows differ, or all where none does."""
        return tuple(at for at in self.own if len({row.key[at] for row in self.rows}) > 1) or self.own


@dataclass(frozen=True)
class Layout:
    """All rows of a frame in their places."""

    sections: tuple[Section, ...]
    records: tuple[Record, ...]
    """The rows that have a place, in the frame's order."""


def lay_out(frame: pd.DataFrame, columns: Iterable[str] = (), *, all_rows: bool = False) -> Layout:
    """The newest row of each cell, or every row, by workload and hardware; `columns`: what records need beside keys.

    A section's rows are problems and its columns variants. A field of the problem that varies becomes a key of the
    row; an option that a variant was run with becomes a column of its own; rows that still fall on the same cell are
    told apart by what differs in their jobs and, where nothing does, by a number that counts from the newest. So every
    row of the frame is in exactly one place.
    """
    known = workloads()
    found = records(frame if all_rows else newest(frame), columns, known)
    groups: dict[Key, list[Record]] = defaultdict(list)
    for record in found:
        workload = known.get(record["workload"])
        layout = workload.pivot if workload else Pivot()
        for name, compute in layout.derived.items():
            record[name] = _derive(compute, record)
        names = ("workload", "device", "hardware", *layout.sections)
        groups[tuple(record[name] for name in names)].append(record)
    places = {name: place for place, name in enumerate(known)}
    ordered = sorted(
        groups,
        key=lambda key: (places.get(key[0], len(places)), key[1] == "cpu", [order(value) for value in key]),
    )
    return Layout(tuple(_section(groups[key], known.get(key[0])) for key in ordered), tuple(found))


def _derive(compute: Callable[[Record], Any], record: Record) -> Any:
    try:
        return compute(record)
    except (TypeError, ZeroDivisionError):  # the row lacks what it is computed from
        return None


def _section(found: list[Record], workload: Workload | None) -> Section:
    layout = workload.pivot if workload else Pivot()
    problem = (identity(workload) if workload else {"dp_size": 1}) | {"nodes": 1}
    placed = {*layout.rows, *layout.sections, *layout.implied}
    free = {name: default for name, default in problem.items() if name not in placed}
    keys = [*layout.rows, *(name for name in free if len(_values(found, name)) > 1)]
    facts = {name: say(found[0][name]) for name in ("workload", *layout.sections, "hardware", "device")}
    if found[0]["hardware"] is None:
        facts["hardware"] = "unknown hardware"
    for name, default in free.items():
        for value in _values(found, name) if name not in keys else ():
            if value != default:
                facts[label(name)] = say(value)
    columns = _columns(found, workload)
    keys += _tell_apart(found, keys, columns)
    grid: dict[Key, dict[Key, Record]] = defaultdict(dict)
    for record, column in zip(found, columns, strict=True):
        grid[tuple(record[name] for name in keys)][column] = record
    heads = sorted(set(columns), key=lambda column: _column_order(column, workload))
    return Section(
        workload=facts["workload"],
        facts={name: text for name, text in facts.items() if text != NEVER_RUN},
        names=tuple(keys),
        heads=tuple(map(_head, heads)),
        rows=tuple(
            Row(key, tuple(grid[key].get(column) for column in heads))
            for key in sorted(grid, key=lambda key: [order(value) for value in key])
        ),
        derived=frozenset(layout.derived),
    )


def _values(found: Iterable[Record], name: str) -> set[Any]:
    """The values that rows have; a row that never ran may not say, and that is no other value."""
    return {record[name] for record in found} - {None}


def _columns(found: list[Record], workload: Workload | None) -> list[Key]:
    """Each row's column: its variant, then the options that it was run with, as (name, value) in declared order."""
    defaults = {**(workload.option_defaults if workload else {"block_cap": "auto"}), "graph": False}
    return [
        (
            record["variant"],
            *((name, record[name]) for name, default in defaults.items() if record[name] not in (None, default)),
        )
        for record in found
    ]


def _column_order(column: Key, workload: Workload | None) -> Key:
    variant, *options = column
    declared = list(workload.variants) if workload else []
    place = declared.index(variant) if variant in declared else len(declared)
    return (place, order(variant), [(name, order(value)) for name, value in options])


def _head(column: Key) -> str:
    variant, *options = column
    return " ".join([say(variant), *(f"{label(name)}={say(value)}" for name, value in options)])


def _tell_apart(found: list[Record], keys: list[str], columns: list[Key]) -> list[str]:
    """More keys, put into the rows, such that no two rows share a cell."""
    added: list[str] = []
    differing: set[str] = set()
    for group in _crowded(found, keys, columns):
        jobs = [job_fields(record) for record in group]
        names = {name for job in jobs for name in job} - {*NOT_IN_KEY}
        differing |= {name for name in names if len({job.get(name) for job in jobs}) > 1}
    if differing:
        added = [f"job {name}" for name in sorted(differing)]
        for record in found:
            job = job_fields(record)
            record.update({f"job {name}": job.get(name) for name in differing})
    crowded = _crowded(found, [*keys, *added], columns)
    if crowded:
        for record in found:
            record["run"] = 1
        for group in crowded:
            for count, record in enumerate(reversed(group), start=1):
                record["run"] = count
        added.append("run")
    return added


def _crowded(found: list[Record], keys: list[str], columns: list[Key]) -> list[list[Record]]:
    """The groups of rows that share a cell."""
    places: dict[Key, list[Record]] = defaultdict(list)
    for record, column in zip(found, columns, strict=True):
        places[(*(record[name] for name in keys), column)].append(record)
    return [group for group in places.values() if len(group) > 1]
