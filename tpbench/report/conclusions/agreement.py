"""Check that equal problems show equal losses, for all variants, world sizes and machines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pandas as pd

from tpbench.report.grids.records import Record, column_label, problem_identity, record_label, row_records, value_text
from tpbench.report.numbers.metric import number
from tpbench.results.current_rows import newest
from tpbench.suggestions import printable
from tpbench.workloads import Workload, workloads

REPEAT = "Measure both again, and use neither until they agree"
DIVERGED = "Repeat with a lower learning_rate; if they still part, one of them is wrong"


def frame_warnings(frame: pd.DataFrame, *, all_rows: bool = False) -> tuple[str, ...]:
    """Return the sentences about the newest row of each cell of `frame`, or about every row, safe to print."""
    rows = row_records(frame if all_rows else newest(frame), (), workloads())
    return printed(disagreements(rows, workloads()))


def printed(sentences: Iterable[str]) -> tuple[str, ...]:
    """Return sentences without characters that act on a terminal."""
    return tuple(printable(sentence, 600) for sentence in sentences)


def disagreements(rows: list[Record], known: dict[str, Workload]) -> list[str]:
    """Return a sentence for each problem whose correct rows differ by more than their dtype allows.

    The sentence names the problem, the two rows that are farthest apart, and what to do.
    """
    return [
        sentence
        for (name, *_), alike in equal_problems(rows, known).items()
        if (sentence := _sentence(alike, known[str(name)]))
    ]


def equal_problems(rows: list[Record], known: dict[str, Workload]) -> dict[tuple[Any, ...], list[Record]]:
    """Group the correct rows that must show equal losses, by workload and problem."""
    problems: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for row in rows:
        if row["status"] == "ok" and row["loss_value"] is not None and row["workload"] in known:
            key = tuple(row[name] for name in problem_identity(known[row["workload"]]))
            problems[(row["workload"], *key)].append(row)
    return problems


def disagreeing_rows(rows: list[Record], known: dict[str, Workload]) -> frozenset[str]:
    """Return the ids of all rows of the problems that `disagreements` names."""
    return frozenset(
        str(row["row_id"])
        for (name, *_), alike in equal_problems(rows, known).items()
        if _parts(alike, known[str(name)])
        for row in alike
    )


def _sentence(alike: list[Record], workload: Workload) -> str:
    """Return the sentence about one problem, or an empty string if its rows agree."""
    parts = _parts(alike, workload)
    if not parts:
        return ""
    diverged = any(part.split()[0] in workload.pivot.trajectories for part in parts)
    said = "diverge" if diverged else "show different losses"
    advice = DIVERGED if diverged else REPEAT
    return f"equal problems {said} ({_problem(alike[0], workload)}): {'; '.join(parts)}. {advice}"


def _parts(alike: list[Record], workload: Workload) -> list[str]:
    """Return where the rows of one problem differ by more than the tolerance: step by step, and in the loss."""
    differences = []
    for name, growth in workload.pivot.trajectories.items():
        tolerance = _tolerance(alike, workload)
        paths = [(row, row[name]) for row in alike if row.get(name) is not None and len(row[name])]
        for step in range(max((len(values) for _, values in paths), default=0)):
            at_step = [(row, float(values[step])) for row, values in paths if len(values) > step]
            if part := _far_apart(at_step, tolerance):
                differences.append(f"{name} part at step {step + 1}: {part}")
                break
            tolerance *= growth
    if not differences and (
        part := _far_apart([(row, row["loss_value"]) for row in alike], _tolerance(alike, workload))
    ):
        differences.append(part)
    return differences


def _tolerance(alike: list[Record], workload: Workload) -> float:
    return workload.pivot.loss_tolerance.get(alike[0]["dtype"], 1e-4)


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
    identity = problem_identity(workload)
    shown = {
        name: row[name]
        for name, default in identity.items()
        if row[name] is not None and name not in workload.pivot.implied
        if row[name] != default or name in workload.pivot.rows
    }
    shown.setdefault("tokens", row["tokens"])
    fields = [f"{column_label(name)}={value_text(value)}" for name, value in shown.items() if value is not None]
    return printable(" ".join([workload.name, *fields]), 300)
