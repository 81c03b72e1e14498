"""Equal problems must show equal losses, whatever solved them and wherever."""

from __future__ import annotations

import itertools
from collections import defaultdict

from tpbench.report.escape import plain
from tpbench.report.metric import number
from tpbench.report.records import Record, identity, label, say
from tpbench.workloads import Workload


def disagreements(rows: list[Record], workloads: dict[str, Workload]) -> list[str]:
    """A sentence for each problem whose right rows differ by more than their dtype allows, naming the two ends."""
    problems: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for row in rows:
        if row["status"] == "ok" and row["loss_value"] is not None and row["workload"] in workloads:
            key = tuple(row[name] for name in identity(workloads[row["workload"]]))
            problems[(row["workload"], *key)].append(row)
    sentences = []
    for (name, *values), alike in problems.items():
        workload = workloads[str(name)]
        sentences += _trajectories(alike, workload)
        low = min(alike, key=lambda row: row["loss_value"])
        high = max(alike, key=lambda row: row["loss_value"])
        tolerance = workload.pivot.loss_tolerance.get(low["dtype"], 1e-4)
        scale = max(1.0, abs(low["loss_value"]), abs(high["loss_value"]))
        if high["loss_value"] - low["loss_value"] > tolerance * scale:
            problem = " ".join(
                f"{label(field)}={say(value)}"
                for (field, default), value in zip(identity(workload).items(), values, strict=True)
                if value != default
            )
            sentences.append(
                f"equal problems show different losses ({name} {problem}): {_name(low)} and {_name(high)}; "
                f"a share of {tolerance:g} is allowed"
            )
    return sentences


def _trajectories(alike: list[Record], workload: Workload) -> list[str]:
    """A sentence for each column of numbers by step in which two rows of the same problem part too far."""
    sentences = []
    for name, growth in workload.pivot.trajectories.items():
        told = [row for row in alike if row.get(name) is not None and len(row[name])]
        for first, other in itertools.pairwise(told):
            tolerance = workload.pivot.loss_tolerance.get(first["dtype"], 1e-4) / growth
            for step, (one, two) in enumerate(zip(first[name], other[name], strict=False), start=1):
                tolerance *= growth
                if not abs(one - two) <= tolerance * max(1.0, abs(one), abs(two)):
                    sentences.append(
                        f"{workload.name} on equal problems: {name} part at step {step}: {_at(first, one)} and "
                        f"{_at(other, two)}; a share of {tolerance:g} is allowed"
                    )
                    break
    return sentences


def _at(row: Record, value: float) -> str:
    return f"{say(row['variant'])} {number(value)} (row {plain(str(row['row_id']))})"


def _name(row: Record) -> str:
    return _at(row, row["loss_value"])
