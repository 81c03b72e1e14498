"""Warnings: equal problems with different losses, and tables whose rows mix hosts, commits or kernel versions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import pandas as pd

from tpbench.report.analysis.grid import RecordGrid
from tpbench.report.analysis.metrics import counted, number
from tpbench.report.analysis.records import (
    Record,
    column_label,
    problem_identity,
    record_label,
    row_records,
    value_text,
)
from tpbench.results.current_rows import newest
from tpbench.suggestions import printable
from tpbench.workloads import Workload, workloads

REPEAT = "Measure both again, and use neither until they agree"
DIVERGED = "Repeat with a lower learning_rate; if they still part, one of them is wrong"
PROVENANCE = {"host": "hosts", "git_commit": "commits", "kernels_version": "kernel versions"}
"""Columns in which rows of a table should agree, with the plural of their meaning."""


def frame_warnings(frame: pd.DataFrame, *, all_rows: bool = False) -> tuple[str, ...]:
    """Return the sentences about the newest row of each cell of `frame`, or about every row, safe to print."""
    return disagreements(row_records(frame if all_rows else newest(frame), (), workloads()))


def disagreements(rows: Iterable[Record]) -> tuple[str, ...]:
    """Return a sentence for each problem whose correct rows differ by more than their dtype allows.

    The sentence names the problem, the two rows that are farthest apart, and what to do. It is safe to print.
    """
    return tuple(printable(_sentence(*disputed), 600) for disputed in _disputed(rows))


def disagreeing_rows(rows: Iterable[Record]) -> frozenset[str]:
    """Return the ids of all rows of the problems that `disagreements` names."""
    return frozenset(str(row["row_id"]) for _, equal_rows, _ in _disputed(rows) for row in equal_rows)


def _disputed(rows: Iterable[Record]) -> Iterator[tuple[Workload, Sequence[Record], list[str]]]:
    """Iterate over the problems whose correct rows differ: the workload, the rows, and where they differ."""
    known = workloads()
    problems: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for row in rows:
        if row["status"] == "ok" and row["loss_value"] is not None and row["workload"] in known:
            identity = (row[name] for name in problem_identity(known[row["workload"]]))
            problems[(row["workload"], *identity)].append(row)
    for (name, *_), equal_rows in problems.items():
        workload = known[str(name)]
        if differences := _differences(equal_rows, workload):
            yield workload, equal_rows, differences


def _sentence(workload: Workload, equal_rows: Sequence[Record], differences: Sequence[str]) -> str:
    diverged = any(part.split()[0] in workload.pivot.trajectories for part in differences)
    verb, advice = ("diverge", DIVERGED) if diverged else ("show different losses", REPEAT)
    return f"equal problems {verb} ({_problem(equal_rows[0], workload)}): {'; '.join(differences)}. {advice}"


def _differences(equal_rows: Sequence[Record], workload: Workload) -> list[str]:
    """Return where the rows of one problem differ by more than the tolerance: step by step, and in the loss."""
    loss_tolerance = workload.pivot.loss_tolerance.get(equal_rows[0]["dtype"], 1e-4)
    differences = []
    for name, growth in workload.pivot.trajectories.items():
        tolerance = loss_tolerance
        paths = [(row, row[name]) for row in equal_rows if row.get(name) is not None and len(row[name])]
        for step in range(max((len(values) for _, values in paths), default=0)):
            at_step = [(row, float(values[step])) for row, values in paths if len(values) > step]
            if part := _far_apart(at_step, tolerance):
                differences.append(f"{name} part at step {step + 1}: {part}")
                break
            tolerance *= growth
    if not differences and (part := _far_apart([(row, row["loss_value"]) for row in equal_rows], loss_tolerance)):
        differences.append(part)
    return differences


def _far_apart(values: list[tuple[Record, float]], tolerance: float) -> str:
    """Name the lowest and the highest value, in the order of the rows, if they differ by more than the tolerance."""

    def size(index: int) -> tuple[bool, float]:
        value = values[index][1]
        return (math.isnan(value), 0.0 if math.isnan(value) else value)

    if not values:
        return ""
    ends = sorted((min(range(len(values)), key=size), max(range(len(values)), key=size)))
    (one, low), (other, high) = (values[at] for at in ends)
    if all(math.isnan(value) for _, value in values) or abs(low - high) <= tolerance * max(1.0, abs(low), abs(high)):
        return ""
    return f"{_named(one)} {number(low)} and {_named(other)} {number(high)}; a share of {tolerance:g} is allowed"


def _named(row: Record) -> str:
    """Name a row by its variant with options, and by its mesh."""
    return f"{record_label(row)} (dp{value_text(row['dp_size'])} x tp{value_text(row['tp_size'])})"


def _problem(row: Record, workload: Workload) -> str:
    """Name a problem by the fields that are not implied and not the default, and by its tokens."""
    shown = {
        name: row[name]
        for name, default in problem_identity(workload).items()
        if row[name] is not None and name not in workload.pivot.implied
        if row[name] != default or name in workload.pivot.rows
    }
    shown.setdefault("tokens", row["tokens"])
    fields = [f"{column_label(name)}={value_text(value)}" for name, value in shown.items() if value is not None]
    return printable(" ".join([workload.name, *fields]), 300)


def differing_provenance(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return the columns of `PROVENANCE` in which records differ, with their values.

    A missing value doesn't count as a difference.
    """
    records = list(records)
    values = {name: sorted({value_text(record[name]) for record in records if record[name]}) for name in PROVENANCE}
    return {name: distinct for name, distinct in values.items() if len(distinct) > 1}


def mixing_note(grid: RecordGrid, place: str = "This table") -> str:
    """Return a sentence about what the rows of a grid mix, and how many problems compare such rows. Empty: nothing.

    `place` is the subject of the sentence: what shows the grid.
    """
    mixed = differing_provenance(cell.record for cell in grid.cells())
    if not mixed:
        return ""
    hosts = f" ({', '.join(mixed['host'])})" if "host" in mixed else ""
    kinds = [f"{len(values)} {PROVENANCE[name]}{hosts if name == 'host' else ''}" for name, values in mixed.items()]
    listed = " and ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))
    which = "one of them" if len(kinds) > 1 else "them"
    differing = sum(bool(differing_provenance(record for record in row.records if record)) for row in grid.rows)
    if not differing:
        return f"{place} mixes {listed}; no problem compares rows that differ in {which}"
    problems = f"{differing} of {counted(len(grid.rows), 'problem')}"
    return f"{place} mixes {listed}; in {problems} the compared rows differ in {which}"
