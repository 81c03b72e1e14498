"""Check that equal problems show equal losses, for all variants, world sizes and machines."""

from __future__ import annotations

import itertools
from collections import defaultdict

from tpbench.report.escape import printable
from tpbench.report.metric import number
from tpbench.report.records import Record, column_label, problem_identity, value_text
from tpbench.workloads import Workload


def disagreements(rows: list[Record], workloads: dict[str, Workload]) -> list[str]:
    """Return a sentence for each problem whose correct rows differ by more than their dtype allows.

    The sentence names the two rows that are farthest apart.
    """
    problems: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for row in rows:
        if row["status"] == "ok" and row["loss_value"] is not None and row["workload"] in workloads:
            key = tuple(row[name] for name in problem_identity(workloads[row["workload"]]))
            problems[(row["workload"], *key)].append(row)
    sentences = []
    for (name, *values), alike in problems.items():
        workload = workloads[str(name)]
        sentences += _diverging_trajectories(alike, workload)
        low = min(alike, key=lambda row: row["loss_value"])
        high = max(alike, key=lambda row: row["loss_value"])
        tolerance = workload.pivot.loss_tolerance.get(low["dtype"], 1e-4)
        scale = max(1.0, abs(low["loss_value"]), abs(high["loss_value"]))
        if high["loss_value"] - low["loss_value"] > tolerance * scale:
            problem = " ".join(
                f"{column_label(field)}={value_text(value)}"
                for (field, default), value in zip(problem_identity(workload).items(), values, strict=True)
                if value != default
            )
            sentences.append(
                f"equal problems show different losses ({name} {problem}): {_loss(low)} and {_loss(high)}; "
                f"a share of {tolerance:g} is allowed"
            )
    return sentences


def _diverging_trajectories(alike: list[Record], workload: Workload) -> list[str]:
    """Return a sentence for each column with one number per step in which two rows of the same problem diverge."""
    sentences = []
    for name, growth in workload.pivot.trajectories.items():
        rows = [row for row in alike if row.get(name) is not None and len(row[name])]
        for first, other in itertools.pairwise(rows):
            tolerance = workload.pivot.loss_tolerance.get(first["dtype"], 1e-4) / growth
            for step, (one, two) in enumerate(zip(first[name], other[name], strict=False), start=1):
                tolerance *= growth
                if not abs(one - two) <= tolerance * max(1.0, abs(one), abs(two)):
                    sentences.append(
                        f"{workload.name} on equal problems: {name} part at step {step}: {_value(first, one)} and "
                        f"{_value(other, two)}; a share of {tolerance:g} is allowed"
                    )
                    break
    return sentences


def _value(row: Record, value: float) -> str:
    return f"{value_text(row['variant'])} {number(value)} (row {printable(str(row['row_id']))})"


def _loss(row: Record) -> str:
    return _value(row, row["loss_value"])
