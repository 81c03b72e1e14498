"""Pairs of rows of the same cell in two sets, and the reasons why a pair must not be compared."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from tpbench.report.records import Record, column_label, problem_fields, problem_identity, value_text
from tpbench.results.cells import hardware, yielding
from tpbench.results.plain import plain_rows
from tpbench.workloads import workloads

CellIdentity: TypeAlias = tuple[tuple[str, Any], ...]

MUST_AGREE = (
    "gpu_name", "cpu_model", "driver_version", "cuda_version", "nccl_version", "torch_version", "triton_version",
    "python_version", "backend", "interpreted", "warmed_up", "memory_limit_gib",
)  # fmt: skip
"""Columns that must be equal for two rows to be compared, if both rows have them.

The model of the CPU counts on a CPU only. The memory limit counts on a GPU only, because on a CPU it is the memory that
was free. Versions of tpbench and its kernels may differ, because a comparison shows their effect."""
NOTED = ("host", "gpu_count")
"""Columns whose difference is noted but permitted."""
_SPEEDS = {"copy_gb_per_s": "copy bandwidth of the machine", "sm_clock_mhz": "clock of the GPU"}
_SPEED_SHARE = 0.03
BESIDE = "beside"
"""Column with the jobs that ran on the host at the same time. Two rows are compared only if both ran alone."""
ACROSS = (*MUST_AGREE, BESIDE)
"""Columns whose difference a user may allow."""
_ALWAYS = ("workload", "variant", "device", "graph", "nodes", "tp_size", "dp_size")


@dataclass(frozen=True)
class CellPair:
    """One cell in both sets, or in one of them."""

    name: str
    before: Record | None
    after: Record | None


def pair_cells(before: pd.DataFrame, after: pd.DataFrame) -> list[CellPair]:
    """Pair the newest row of each cell with that of the other set, on the same hardware if possible."""
    old, new = _by_identity(before), _by_identity(after)
    names = _names([*old, *new])
    pairs = []
    for cell in dict.fromkeys([*new, *old]):
        left, right = dict(old.get(cell, {})), dict(new.get(cell, {}))
        for machine in [machine for machine in right if machine in left]:
            pairs.append(CellPair(names[cell], left.pop(machine), right.pop(machine)))
        while left and right:
            pairs.append(CellPair(names[cell], left.pop(next(iter(left))), right.pop(next(iter(right)))))
        pairs += [CellPair(names[cell], record, None) for record in left.values()]
        pairs += [CellPair(names[cell], None, record) for record in right.values()]
    return pairs


def _by_identity(frame: pd.DataFrame) -> dict[CellIdentity, dict[Any, Record]]:
    """Return the newest row by cell and hardware. Failures beside a measurement are left out (`results.cells`)."""
    frame = frame.drop(yielding(frame))
    frame = frame.assign(hardware=hardware(frame)["hardware"], when=frame["finished_at"].fillna(frame["started_at"]))
    frame = frame.sort_values("when", kind="stable", na_position="first")
    cells: dict[CellIdentity, dict[Any, Record]] = defaultdict(dict)
    for record in plain_rows(frame):
        by_hardware = cells[_identity(record)]
        by_hardware.pop(record["hardware"], None)
        by_hardware[record["hardware"]] = record
    return cells


def _identity(record: Record) -> CellIdentity:
    """Return the whole problem of a cell, options included. It does not depend on the defaults of the configuration."""
    workload = workloads().get(record["workload"])
    names: dict[str, Any] = dict.fromkeys(_ALWAYS)
    names |= (
        (problem_fields(workload) | problem_identity(workload))
        if workload
        else dict.fromkeys(("loss", "dtype", "vocab", "tokens"))
    )
    names |= {"dp_size": 1, "nodes": 1, "graph": False}
    values = {name: default if record.get(name) is None else record[name] for name, default in names.items()}
    return tuple((name, str(value) if name == "block_cap" else _hashable(value)) for name, value in values.items())


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else json.dumps(value, default=str)


def _names(cells: Iterable[CellIdentity]) -> dict[CellIdentity, str]:
    """Return the name of each cell: its variant, and the fields in which cells differ."""
    cells = list(cells)
    seen: dict[str, set[Any]] = defaultdict(set)
    for cell in cells:
        for name, value in cell:
            seen[name].add(value)
    always = {"vocab", "tp_size"}
    defaults = {option for workload in workloads().values() for option in workload.option_defaults.items()}
    first = ("workload", "loss", "dtype", "tokens", "vocab", "tp_size")
    names = {}
    for cell in cells:
        parts = [
            f"{column_label(name)}={value_text(value)}"
            for name, value in sorted(cell, key=lambda item: first.index(item[0]) if item[0] in first else len(first))
            if name != "variant"
            and value is not None
            and (name, value) not in defaults
            and (name in always or len(seen[name]) > 1)
        ]
        names[cell] = " ".join([value_text(dict(cell)["variant"]), *parts])
    return names


def differences(before: Record, after: Record, allowed: Iterable[str] = ()) -> list[str]:
    """Return why two rows must not be compared: differences in hardware, software and method."""
    cpu = before.get("device") == "cpu"
    skipped = {*allowed, "memory_limit_gib" if cpu else "cpu_model"}
    found = [
        f"{name} {value_text(before[name])} and {value_text(after[name])}"
        for name in MUST_AGREE
        if name not in skipped and _differ(before.get(name), after.get(name))
    ]
    if BESIDE not in skipped:
        found += _other_jobs(before, after)
    return found


def _other_jobs(before: Record, after: Record) -> list[str]:
    shared = [name for name, record in (("before", before), ("after", after)) if record.get(BESIDE)]
    return [f"other jobs ran beside it {' and '.join(shared)}"] if shared else []


def remarks(before: Record, after: Record, allowed: Iterable[str] = ()) -> list[str]:
    """Return differences that permit a comparison but must be noted."""
    allowed = set(allowed)
    names = [*NOTED, *(name for name in MUST_AGREE if name in allowed)]
    found = [
        f"{name} {value_text(before[name])} and {value_text(after[name])}"
        for name in names
        if _differ(before.get(name), after.get(name))
    ]
    if BESIDE in allowed:
        found += _other_jobs(before, after)
    for name, meaning in _SPEEDS.items():
        old, new = before.get(name), after.get(name)
        if old and new and abs(new / old - 1) > _SPEED_SHARE:
            found.append(f"{meaning} {new / old - 1:+.0%}")
    return found


def _differ(old: Any, new: Any) -> bool:
    return old is not None and new is not None and old != new
