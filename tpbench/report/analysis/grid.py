"""Grids of records: problems by variants, from which tables and plots are made. No two different rows are merged."""

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import pandas as pd

from tpbench.measure.statistics import is_host_bound
from tpbench.report.analysis import row_values
from tpbench.report.analysis.row_values import Record, named
from tpbench.results.current_rows import hardware, newest
from tpbench.results.read import chosen_options, plain_rows
from tpbench.suggestions import number, printable
from tpbench.tables import MISSING, short_text, value_item, value_text
from tpbench.workloads import Pivot, Workload, workloads
from tpbench.workloads.definition import workload_of

Key: TypeAlias = tuple[Any, ...]


def row_records(frame: pd.DataFrame) -> list[Record]:
    """Return each row of `load`, with its `hardware`, and with `graph_gib` added to `peak_gib`: an upper bound."""
    records = list(map(Record, plain_rows(frame.assign(**hardware(frame)))))
    for record in records:
        wall, device = record["time_ms"], record["device_ms"]
        if record["bound"] is None and wall and device is not None and is_host_bound(1 - device / wall):
            record["bound"] = "host"  # the row doesn't say what bounds it, but its two clocks do
        if record["peak_gib"] is not None and record["graph_gib"]:
            record["peak_gib"] += record["graph_gib"]
    return records


def problem_fields(workload: Workload | None) -> dict[str, Any]:
    """Return the fields of a workload's problem, options included, with their defaults (None: no default)."""
    fields = dataclasses.fields(workload.problem) if workload else ()
    return {field.name: None if field.default is dataclasses.MISSING else field.default for field in fields}


def problem_identity(workload: Workload | None) -> dict[str, Any]:
    """Return the fields that identify a problem, with their defaults. Equal problems must show equal losses."""
    options = workload.option_defaults.keys() - workload.pivot.sections if workload else ()
    return {name: default for name, default in problem_fields(workload).items() if name not in options} | {"dp_size": 1}


def sort_key(value: Any) -> tuple[int, float, str]:
    """Return a key that sorts values of mixed types: words, then numbers (also as text), then missing values."""
    try:
        size = 0.0 if value is None else float(value)
    except ValueError:
        size = math.inf
    return (2, 0.0, "") if value is None else (1, size, "") if math.isfinite(size) else (0, 0.0, str(value))


@dataclass(frozen=True)
class RecordGrid:
    """Records of one workload on one kind of hardware: a line for each problem, a column for each variant."""

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

    @property
    def named_records(self) -> list[tuple[str, Record]]:
        """All records, each after the name of its cell."""
        return [(f"{record.column} {self.problem_text(record.key)}", record) for record in self.records]

    @cached_property
    def varying(self) -> tuple[int, ...]:
        """Indices of the independent keys in which problems differ, or all independent keys if none differs."""
        return tuple(at for at in self.independent if len({key[at] for key in self.lines}) > 1) or self.independent

    def follows(self, at: int, other: int) -> bool:
        """Return true if `other` has names, each with one value of the key `at`, as models have layers."""
        pairs = {(key[at], key[other]) for key in self.lines}
        is_name = at != other and any(isinstance(name, str) for _, name in pairs)
        return is_name and len({name for _, name in pairs}) == len(pairs)

    def problem_text(self, key: Key, indices: Sequence[int] | None = None) -> str:
        """Return the independent keys of a problem as text, or only the keys at `indices`."""
        return " ".join(named(self.key_names[at], key[at]) for at in indices or self.independent)


def heading(facts: Mapping[str, float | str]) -> str:
    """Return facts as one line. Names and kinds stand alone, numbers with their name."""
    bare = {"workload", "device", "hardware", "loss", "dtype"}
    texts = {name: value if isinstance(value, str) else value_text(value) for name, value in facts.items()}
    return ", ".join(text if name in bare else f"{name}={text}" for name, text in texts.items())


def arrange_rows(frame: pd.DataFrame) -> list[RecordGrid]:
    """Arrange the newest row of each cell in one grid for each workload and kind of hardware."""
    groups: dict[Key, list[Record]] = defaultdict(list)
    for record in row_records(newest(frame)):
        workload = workload_of(record)
        pivot = workload.pivot if workload else Pivot()
        for name, compute in pivot.derived.items():
            with contextlib.suppress(TypeError, ZeroDivisionError):  # the row lacks a value from which it is computed
                record[name] = compute(record)
        place = tuple(record[name] for name in ("workload", "device", "hardware", *pivot.sections))
        groups[*place, form_of(workload)].append(record)
    order = {name: at for at, name in enumerate(workloads())}
    places = sorted(groups, key=lambda key: (order.get(key[0], len(order)), key[1] == "cpu", [*map(sort_key, key)]))
    return [_grid(groups[place], workload_of(groups[place][0])) for place in places]


def form_of(workload: Workload | None) -> str:
    """Return the fields of a form that a user's operation has no more, and its file. Empty for any other workload."""
    if workload is None or workload.definition is None or workload is workloads().get(workload.name):
        return ""
    file = workload.definition.get("path") or workload.definition.get("file") or "unknown file"
    return f"{', '.join(problem_fields(workload))} ({file})"


def _grid(rows: list[Record], workload: Workload | None) -> RecordGrid:
    facts, keys = _split(rows, workload)
    if all(record["fresh"] for record in rows):  # such as those of a user's own operation
        facts["fresh"] = value_text(True)
    lines: dict[Key, dict[Key, Record]] = defaultdict(dict)
    names: dict[Key, str] = {}
    # The first record of a place stays: the newest measurement, or without any the newest row.
    newest_first = sorted(rows, key=lambda row: (row["finished_at"] is not None, row["finished_at"] or 0), reverse=True)
    for record in sorted(newest_first, key=row_values.is_measurement, reverse=True):
        options = [option for option in chosen_options(record, workload) if option[0] not in facts]
        column = (record["variant"], *options)
        names[column] = " ".join([value_text(record["variant"]), *(named(*option) for option in options)])
        record.key, record.column = tuple(record[name] for name in keys), names[column]
        lines[record.key].setdefault(column, record)
    order = {name: at for at, name in enumerate(workload.variants if workload else ())}

    def position(column: Key) -> tuple[Any, ...]:
        variant, *options = column
        return order.get(variant, len(order)), sort_key(variant), [(name, sort_key(value)) for name, value in options]

    columns = sorted(names, key=position)
    return RecordGrid(
        facts={name: text for name, text in facts.items() if text != MISSING},
        key_names=tuple(keys),
        columns=tuple(names[column] for column in columns),
        lines={
            key: [lines[key].get(column) for column in columns]
            for key in sorted(lines, key=lambda key: [*map(sort_key, key)])
        },
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
        facts["form"] = short_text(form, 200)
    keys = [*pivot.rows]
    for name, default in (problem_identity(workload) | {"nodes": 1}).items():
        # A row of a cell that was never run may lack a value. That doesn't count as a difference, unless null is one.
        values = {record[name] for record in rows} - (set() if default is None else {None})
        if name not in placed and len(values) > 1:
            keys.append(name)
        elif name not in placed and values and values != {default}:
            facts[row_values.column_label(name)] = value_item(*values)
    limits: dict[Key, set[float]] = defaultdict(set)
    for record in rows:
        if limit := record["memory_limit_gib"]:
            limits[record["variant"], *chosen_options(record, workload), *map(record.get, keys)].add(limit)
    # A cell was tried with several limits, to see how much it needs. GPUs of one kind differ by less.
    if any(max(values) > 1.05 * min(values) for values in limits.values()):
        keys.append("memory_limit_gib")
    return facts, keys


def disagreements(rows: Iterable[Record]) -> dict[str, frozenset[str]]:
    """Return a printable sentence for each problem whose correct rows have too different losses, with the rows' ids."""
    problems: dict[Key, list[Record]] = defaultdict(list)
    for row in rows:
        workload = workload_of(row)
        if workload and row["status"] == "ok" and row["loss_value"] is not None:
            problems[workload.name, *((name, row[name]) for name in problem_identity(workload))].append(row)
    sentences = {}
    for (_, *fields), equal_rows in problems.items():
        one, *_, other = sorted(2 * equal_rows, key=lambda row: (math.isnan(row["loss_value"]), row["loss_value"]))
        low, high, workload = one["loss_value"], other["loss_value"], workload_of(one)
        assert workload
        pivot, defaults = workload.pivot, problem_identity(workload)
        tolerance = pivot.loss_tolerance.get(one["dtype"], 1e-4)
        if math.isnan(low) or abs(low - high) <= tolerance * max(1.0, abs(low), abs(high)):
            continue
        told = [
            named(name, value)
            for name, value in fields
            if value is not None and name not in pivot.implied and (name in pivot.rows or value != defaults[name])
        ]
        first, last = (
            f"{value_text(row['label'])} (dp{value_text(row['dp_size'])} x tp{value_text(row['tp_size'])}) "
            f"{number(row['loss_value'])}"
            for row in (one, other)
        )
        sentence = (
            f"equal problems show different losses ({' '.join([workload.name, *told])}): {first} and {last}; a share "
            f"of {tolerance:g} is allowed. Measure both again, and use neither until they agree"
        )
        sentences[printable(sentence, 600)] = frozenset(str(row["row_id"]) for row in equal_rows)
    return sentences


def mixing_note(grid: RecordGrid) -> str:
    """Return sentences about the hosts, versions and inputs that a grid's rows mix, or an empty text."""
    kinds = []
    for name, plural in (("host", "hosts"), ("git_commit", "commits"), ("kernels_version", "kernel versions")):
        if len(values := sorted({value_text(record[name]) for record in grid.records if record[name]})) > 1:
            kinds.append(f"{len(values)} {plural}" + (f" ({', '.join(values)})" if name == "host" else ""))
    sentences = [f"This table mixes {', '.join(kinds)}"] if kinds else []
    if any(len({bool(record["fresh"]) for record in line if record}) > 1 for line in grid.lines.values()):
        sentences.append("Rows with fresh=true have inputs that change, and are compared only with each other")
    return ". ".join(sentences)
