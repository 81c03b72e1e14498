"""Rows of a frame as plain dictionaries, and how their values are named in a report."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import pandas as pd

from tpbench.report.escape import plain
from tpbench.results.cells import hardware
from tpbench.results.plain import plain_rows
from tpbench.workloads import Workload

Record: TypeAlias = dict[str, Any]

_NEEDED = (
    "row_id", "cell", "workload", "variant", "status", "reason", "tokens", "vocab", "tp_size", "dp_size", "loss",
    "block_cap", "dtype", "interpreted", "warmed_up", "graph", "nodes", "loss_value", "job",
    "interleaved", "round_ms", "device_round_ms",
)  # fmt: skip
_LABELS = {"tp_size": "tp", "dp_size": "dp"}


def records(frame: pd.DataFrame, columns: Iterable[str], workloads: dict[str, Workload]) -> list[Record]:
    """Each row as a dictionary of what a report needs and of `columns`; what is missing is None."""
    names = dict.fromkeys((*_NEEDED, *columns))
    for workload in workloads.values():
        names |= dict.fromkeys((*fields(workload), *workload.pivot.rows, *workload.pivot.sections))
        names |= dict.fromkeys(workload.pivot.trajectories)
    names |= dict.fromkeys(("device", "hardware"))
    return plain_rows(frame.assign(**hardware(frame)).reindex(columns=list(names)))


def fields(workload: Workload) -> dict[str, Any]:
    """The fields of a workload's problem, options included, with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(workload.problem)}


def identity(workload: Workload) -> dict[str, Any]:
    """The fields that make one problem another, with their defaults: equal ones must show an equal loss."""
    options = {option.name for option in workload.options}
    problem = {name: default for name, default in fields(workload).items() if name not in options}
    return problem | {"dp_size": 1}


def job_fields(record: Record) -> dict[str, Any]:
    """The resolved job that made a row, flat; empty where it is not to be had."""
    try:
        job = json.loads(record["job"] or "{}")
    except (ValueError, RecursionError):
        return {}
    flat: dict[str, Any] = {}
    pending = [("", job)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
        else:
            flat[name] = value if isinstance(value, (int, float, str, type(None))) else json.dumps(value)
    return flat


def label(name: str) -> str:
    """A column's name as a report has it."""
    return _LABELS.get(name, plain(name, 40))


def say(value: Any) -> str:
    """A key's value as a command line has it."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else plain(str(value), 60)


def order(value: Any) -> tuple[int, float, str]:
    """Sorts values of mixed kinds: words, then numbers (those written as text too), then what is missing."""
    if value is None:
        return (2, 0.0, "")
    try:
        if math.isfinite(size := float(value)):
            return (1, size, "")
    except ValueError:
        pass
    return (0, 0.0, str(value))
