"""Grids of records: problems by variants, from which tables and plots are made. No two different rows are merged."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, TypeAlias

import pandas as pd

from tpbench.report.analysis import records
from tpbench.report.analysis.records import Record, column_label, named, sort_key, value_item, value_text
from tpbench.results.current_rows import newest
from tpbench.results.read import chosen_options
from tpbench.tables import MISSING
from tpbench.workloads import Pivot, Workload, workloads
from tpbench.workloads.definition import workload_of

Key: TypeAlias = tuple[Any, ...]
_EARLIEST = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class RecordGrid:
    """Records of one workload on one kind of hardware: a line for each problem, a column for each variant."""

    workload: str
    facts: dict[str, float | str]
    """Values that all records share, by name: numbers, and texts that are safe to print."""
    key_names: tuple[str, ...]
    """Fields that are the keys of a problem."""
    columns: tuple[str, ...]
    """Names of the columns: a variant and the options that it was run with. They are safe to print."""
    lines: Mapping[Key, Sequence[Record | None]]
    """By the key of each problem, a record for each column (None: never run)."""
    independent: tuple[int, ...]
    """Indices of the keys that don't follow from other fields."""

    @cached_property
    def records(self) -> list[Record]:
        """All records, problem by problem."""
        return [record for line in self.lines.values() for record in line if record]

    @cached_property
    def varying(self) -> tuple[int, ...]:
        """Indices of the independent keys in which problems differ, or all independent keys if none differs."""
        return tuple(at for at in self.independent if len({key[at] for key in self.lines}) > 1) or self.independent

    def follows(self, at: int, other: int) -> bool:
        """Return true if `other` has names, each with one value of the key `at`, as models have layers."""
        pairs = {(key[at], key[other]) for key in self.lines}
        named = at != other and any(isinstance(name, str) for _, name in pairs)
        return named and len({name for _, name in pairs}) == len(pairs)

    def problem_text(self, key: Key, indices: Sequence[int] | None = None) -> str:
        """Return the independent keys of a problem as text, or only the keys at `indices`."""
        return " ".join(named(self.key_names[at], key[at]) for at in indices or self.independent)


def heading(facts: Mapping[str, float | str]) -> str:
    """Return facts as one line. Names and kinds stand alone, numbers with their name."""
    bare = {"workload", "device", "hardware", "loss", "dtype"}
    return ", ".join(str(value) if name in bare else f"{name}={value_text(value)}" for name, value in facts.items())


def arrange_rows(frame: pd.DataFrame) -> list[RecordGrid]:
    """Arrange the newest row of each cell in one grid for each workload and kind of hardware."""
    groups: dict[Key, list[Record]] = defaultdict(list)
    for record in records.row_records(newest(frame)):
        workload = workload_of(record)
        pivot = workload.pivot if workload else Pivot()
        for name, compute in pivot.derived.items():
            try:
                record[name] = compute(record)
            except (TypeError, ZeroDivisionError):  # the row lacks a value from which it is computed
                record[name] = None
        place = tuple(record[name] for name in ("workload", "device", "hardware", *pivot.sections))
        groups[*place, form_of(workload)].append(record)
    names = [*workloads()]

    def position(key: Key) -> tuple[Any, ...]:
        workload, device, *_ = key
        at = names.index(workload) if workload in names else len(names)
        return at, device == "cpu", [*map(sort_key, key)]

    return [_grid(groups[key], workload_of(groups[key][0])) for key in sorted(groups, key=position)]


def form_of(workload: Workload | None) -> str:
    """Return the fields of a form that a user's operation has no more, and its file. Empty for any other workload."""
    if workload is None or workload.definition is None or workload is workloads().get(workload.name):
        return ""
    file = workload.definition.get("path") or workload.definition.get("file") or "unknown file"
    return f"{', '.join(records.problem_fields(workload))} ({file})"


def _grid(rows: list[Record], workload: Workload | None) -> RecordGrid:
    facts, keys = _split(rows, workload)
    all_fresh = all(record["fresh"] for record in rows)  # such as those of a user's own operation
    if all_fresh:
        facts["fresh"] = value_text(True)
    lines: dict[Key, dict[Key, Record]] = defaultdict(dict)
    # The first record of a place stays: the newest measurement, or without any the newest row.
    for record in sorted(
        rows, key=lambda row: (records.is_measurement(row), row["finished_at"] or _EARLIEST), reverse=True
    ):
        options = (option for option in chosen_options(record, workload) if not (all_fresh and option[0] == "fresh"))
        column = (record["variant"], *options)
        record.key, record.column = tuple(record[name] for name in keys), column_name(column)
        lines[record.key].setdefault(column, record)
    variants = [*workload.variants] if workload else []

    def position(column: Key) -> tuple[Any, ...]:
        variant, *options = column
        at = variants.index(variant) if variant in variants else len(variants)
        return at, sort_key(variant), [(name, sort_key(value)) for name, value in options]

    columns = sorted({column for line in lines.values() for column in line}, key=position)
    ordered = sorted(lines, key=lambda key: [*map(sort_key, key)])
    return RecordGrid(
        workload=str(facts["workload"]),
        facts={name: text for name, text in facts.items() if text != MISSING},
        key_names=tuple(keys),
        columns=tuple(map(column_name, columns)),
        lines={key: [lines[key].get(column) for column in columns] for key in ordered},
        independent=tuple(at for at, name in enumerate(keys) if not workload or name not in workload.pivot.derived),
    )


def _split(rows: list[Record], workload: Workload | None) -> tuple[dict[str, float | str], list[str]]:
    """Return the facts that all rows of a grid share, and the keys that split these rows into problems."""
    pivot = workload.pivot if workload else Pivot()
    placed = {*pivot.rows, *pivot.sections, *pivot.implied}
    facts = {name: value_item(rows[0][name]) for name in ("workload", *pivot.sections, "hardware", "device")}
    if rows[0]["hardware"] is None:
        facts["hardware"] = "unknown hardware"
    if form := form_of(workload):
        facts["form"] = records.short_text(form, 200)
    keys = [*pivot.rows]
    for name, default in (records.problem_identity(workload) | {"nodes": 1}).items():
        # A row of a cell that was never run may lack a value. That doesn't count as a difference, unless null is one.
        values = {record[name] for record in rows} - (set() if default is None else {None})
        if name not in placed and len(values) > 1:
            keys.append(name)
        elif name not in placed and values and values != {default}:
            facts[column_label(name)] = value_item(*values)
    return facts, keys


def column_name(column: Key) -> str:
    """Return the name of a column: a variant, and the options that it was run with."""
    variant, *options = column
    return " ".join([value_text(variant), *(named(*option) for option in options)])
