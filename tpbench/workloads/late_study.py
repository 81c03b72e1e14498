"""Study `late`: what a rank that starts late costs the others, and work on another stream of their GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tpbench.measure.session import LATE_MS
from tpbench.settings import spelled
from tpbench.tables import Table
from tpbench.workloads import workloads
from tpbench.workloads.study_data import Panel, Picture, Series, oldest_first

_DELAYS = [f"{delay:g} ms late" for delay in LATE_MS]


def _by_problem(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return the newest rows by problem and machine, then by variant with its options."""
    problems: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in oldest_first(rows):
        if row["status"] != "ok" or row["interpreted"] or row.get("late_ms") is None:
            continue
        workload = workloads()[row["workload"]]
        used = {name: row.get(name) for name in workload.option_defaults}
        options = [f" {name}={spelled(used[name])}" for name, usual in workload.option_defaults.items()
                   if used[name] not in (None, usual)]  # fmt: skip
        keys = dict.fromkeys((*workload.pivot.sections, *workload.headline, "tp_size", "dp_size"))
        facts = [f"{name}={spelled(row[name])}" for name in keys if row.get(name) is not None and name not in used]
        problem = ", ".join([*facts, str(row["gpu_name"] or row["cpu_model"])])
        line = str(row["variant"]) + "".join(options) + " graph=true" * bool(row["graph"])
        problems.setdefault(problem, {})[line] = row
    return dict(sorted(problems.items(), key=lambda item: [int(part) if part.isdigit() else part
                                                           for part in re.split(r"(\d+)", item[0])]))  # fmt: skip


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return two tables of each problem: the other ranks' time, and that of products beside it."""
    made = []
    for problem, lines in _by_problem(rows).items():
        own = [(line, *(f"{ms:.3f}" for ms in row["late_ms"])) for line, row in lines.items()]
        heading = f"time of the other ranks, minus the delay of the late one, ms: {problem}"
        made.append(Table(heading, ("variant", *_DELAYS), own))
        beside = [
            (line, f"{row['beside_alone_ms']:.3f}", *(f"{ms:.3f}" for ms in row["beside_ms"]))
            for line, row in lines.items()
            if row.get("beside_ms") is not None
        ]
        if beside:
            heading = f"time of three products of 4096^3 on another stream of the other ranks, ms: {problem}"
            made.append(Table(heading, ("variant", "alone", *_DELAYS), beside))
    return made


def picture(rows: Sequence[Mapping[str, Any]]) -> Picture | None:
    """Return how much longer the products take beside each variant, a panel for each problem, or None without GPUs."""
    panels = []
    for problem, lines in _by_problem(rows).items():
        series = [
            Series(line, tuple(zip(LATE_MS, (ms / row["beside_alone_ms"] for ms in row["beside_ms"]), strict=True)))
            for line, row in lines.items()
            if row.get("beside_ms") is not None
        ]
        if series:
            panels.append(Panel(problem, tuple(series)))
    labels = "delay of one rank, ms", "time of products beside it, over their time alone"
    return Picture(tuple(panels), *labels) if panels else None
