"""Which row of one set answers to which of another, and whether the two may be compared."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from tpbench.report.records import Record, fields, identity, label, say
from tpbench.results.cells import hardware, yielding
from tpbench.results.plain import plain_rows
from tpbench.workloads import workloads

Identity: TypeAlias = tuple[tuple[str, Any], ...]

MUST_AGREE = (
    "gpu_name", "cpu_model", "driver_version", "cuda_version", "nccl_version", "torch_version", "triton_version",
    "python_version", "backend", "interpreted", "warmed_up", "memory_limit_gib",
)  # fmt: skip
"""Columns that must be equal for two rows to be compared, where both have them (the CPU's model on a CPU alone, the
memory limit on a GPU alone: a CPU's is what happened to be free). Versions of tpbench and its kernels may differ: their
difference is what is compared."""
WORTH_SAYING = ("host", "gpu_count")
_SPEEDS = {"copy_gb_per_s": "copy bandwidth of the machine", "sm_clock_mhz": "clock of the GPU"}
_SPEED_SHARE = 0.03
BESIDE = "beside"
"""The column that says which jobs ran on the host at the same time. Two rows compare only where both were alone."""
ACROSS = (*MUST_AGREE, BESIDE)
"""What a person may allow to differ."""
_ALWAYS = ("workload", "variant", "device", "graph", "nodes", "tp_size", "dp_size")


@dataclass(frozen=True)
class Pair:
    """One cell in both sets, or in one of them."""

    name: str
    before: Record | None
    after: Record | None


def pair(before: pd.DataFrame, after: pd.DataFrame) -> list[Pair]:
    """The newest row of each cell of either set beside the other set's, on the same hardware where it has that."""
    old, new = _by_identity(before), _by_identity(after)
    names = _names([*old, *new])
    pairs = []
    for cell in dict.fromkeys([*new, *old]):
        left, right = dict(old.get(cell, {})), dict(new.get(cell, {}))
        for place in [place for place in right if place in left]:
            pairs.append(Pair(names[cell], left.pop(place), right.pop(place)))
        while left and right:
            pairs.append(Pair(names[cell], left.pop(next(iter(left))), right.pop(next(iter(right)))))
        pairs += [Pair(names[cell], record, None) for record in left.values()]
        pairs += [Pair(names[cell], None, record) for record in right.values()]
    return pairs


def _by_identity(frame: pd.DataFrame) -> dict[Identity, dict[Any, Record]]:
    """Cell, then hardware, to the newest row, but for failures beside a measurement (`results.cells`)."""
    frame = frame.drop(yielding(frame))
    frame = frame.assign(hardware=hardware(frame)["hardware"], when=frame["finished_at"].fillna(frame["started_at"]))
    frame = frame.sort_values("when", kind="stable", na_position="first")
    cells: dict[Identity, dict[Any, Record]] = defaultdict(dict)
    for record in plain_rows(frame):
        here = cells[_identity(record)]
        here.pop(record["hardware"], None)
        here[record["hardware"]] = record
    return cells


def _identity(record: Record) -> Identity:
    """What makes a cell this one: its whole problem, options included, whichever set of defaults it was made under."""
    workload = workloads().get(record["workload"])
    names: dict[str, Any] = dict.fromkeys(_ALWAYS)
    names |= (
        (fields(workload) | identity(workload)) if workload else dict.fromkeys(("loss", "dtype", "vocab", "tokens"))
    )
    names |= {"dp_size": 1, "nodes": 1, "graph": False}
    values = {name: default if record.get(name) is None else record[name] for name, default in names.items()}
    return tuple((name, str(value) if name == "block_cap" else _hashable(value)) for name, value in values.items())


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else json.dumps(value, default=str)


def _names(cells: Iterable[Identity]) -> dict[Identity, str]:
    """What to call each cell: its variant, and what is not the same in all."""
    cells = list(cells)
    seen: dict[str, set[Any]] = defaultdict(set)
    for cell in cells:
        for name, value in cell:
            seen[name].add(value)
    always = {"vocab", "tp_size"}
    plain = {option for workload in workloads().values() for option in workload.option_defaults.items()}
    first = ("workload", "loss", "dtype", "tokens", "vocab", "tp_size")
    names = {}
    for cell in cells:
        parts = [
            f"{label(name)}={say(value)}"
            for name, value in sorted(cell, key=lambda item: first.index(item[0]) if item[0] in first else len(first))
            if name != "variant"
            and value is not None
            and (name, value) not in plain
            and (name in always or len(seen[name]) > 1)
        ]
        names[cell] = " ".join([say(dict(cell)["variant"]), *parts])
    return names


def differences(before: Record, after: Record, allowed: Iterable[str] = ()) -> list[str]:
    """Why the two must not be compared: what differs of where and how they were measured."""
    cpu = before.get("device") == "cpu"
    skipped = {*allowed, "memory_limit_gib" if cpu else "cpu_model"}
    found = [
        f"{name} {say(before[name])} and {say(after[name])}"
        for name in MUST_AGREE
        if name not in skipped and _differ(before.get(name), after.get(name))
    ]
    if BESIDE not in skipped:
        found += _company(before, after)
    return found


def _company(before: Record, after: Record) -> list[str]:
    crowded = [name for name, record in (("before", before), ("after", after)) if record.get(BESIDE)]
    return [f"other jobs ran beside it {' and '.join(crowded)}"] if crowded else []


def remarks(before: Record, after: Record, allowed: Iterable[str] = ()) -> list[str]:
    """What differs and does not forbid it, but belongs beside the numbers."""
    allowed = set(allowed)
    names = [*WORTH_SAYING, *(name for name in MUST_AGREE if name in allowed)]
    said = [
        f"{name} {say(before[name])} and {say(after[name])}"
        for name in names
        if _differ(before.get(name), after.get(name))
    ]
    if BESIDE in allowed:
        said += _company(before, after)
    for name, words in _SPEEDS.items():
        old, new = before.get(name), after.get(name)
        if old and new and abs(new / old - 1) > _SPEED_SHARE:
            said.append(f"{words} {new / old - 1:+.0%}")
    return said


def _differ(old: Any, new: Any) -> bool:
    return old is not None and new is not None and old != new
