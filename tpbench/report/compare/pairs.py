"""Pairs of the same cell in two sets of rows, and the conditions that the rows of a pair share or not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from tpbench.report.analysis.records import (
    BELOW_FLOOR,
    HOST_BOUND,
    THROTTLED,
    Record,
    column_label,
    comparable,
    is_measurement,
    mark_word,
    problem_fields,
    problem_identity,
    remark_marks,
    value_text,
)
from tpbench.results.current_rows import hardware, replaced_rows
from tpbench.results.read import plain_rows
from tpbench.workloads import workloads

CellIdentity: TypeAlias = tuple[tuple[str, Any], ...]

MUST_AGREE = (
    "gpu_name", "cpu_model", "driver_version", "cuda_version", "nccl_version", "torch_version", "triton_version",
    "python_version", "backend", "interpreted", "warmed_up", "memory_limit_gib",
)  # fmt: skip
"""Columns that must be equal for two rows to be compared, if both rows have them.

The model of the CPU counts on a CPU only. The memory limit counts on a GPU only, because on a CPU it is the memory that
was free. Versions of tpbench and its kernels may differ, because a comparison shows their effect."""
BESIDE = "beside"
"""Column with the jobs that ran on the host at the same time. Two rows are compared only if both ran alone."""
ACROSS = (*MUST_AGREE, BESIDE)
"""Columns whose difference a user may allow."""
_CODE = ("tpbench_version", "kernels_version", "variant_version", "git_commit", "git_dirty")
_NOTED = ("host", "gpu_count", *_CODE)
"""Columns whose difference is noted but permitted."""
_SPEEDS = {
    "copy_gb_per_s": "copy bandwidth of the machine",
    "sm_clock_mhz": "clock of the GPU",
    "memory_clock_mhz": "clock of the GPU's memory",
}
_SPEED_SHARE = 0.03
_ALWAYS = ("workload", "variant", "device", "graph", "fresh", "nodes", "tp_size", "dp_size")
_ALWAYS_NAMED = ("vocab", "tp_size")
_NAMED_FIRST = ("workload", "loss", "dtype", "tokens", "vocab", "tp_size")


@dataclass(frozen=True)
class CellPair:
    """One cell in both sets, or in one of them."""

    name: str
    before_rows: tuple[Record, ...]
    after_rows: tuple[Record, ...]
    """The newest row of the cell, and before it the rows that repeat it. Empty if the set has no such cell."""

    @property
    def before(self) -> Record | None:
        """The newest row of the first set."""
        return self.before_rows[-1] if self.before_rows else None

    @property
    def after(self) -> Record | None:
        """The newest row of the second set."""
        return self.after_rows[-1] if self.after_rows else None


def pair_cells(before: pd.DataFrame, after: pd.DataFrame) -> list[CellPair]:
    """Pair the rows of each cell with those of the other set, on the same hardware if possible."""
    old, new = rows_by_cell(before), rows_by_cell(after)
    names = cell_names([*old, *new])
    pairs = []
    for cell in dict.fromkeys([*new, *old]):
        left, right = ({key: _repeated(rows) for key, rows in side.get(cell, {}).items()} for side in (old, new))
        sides = [(left.pop(machine), right.pop(machine)) for machine in [*right] if machine in left]
        while left and right:
            sides.append((left.pop(next(iter(left))), right.pop(next(iter(right)))))
        sides += [(rows, ()) for rows in left.values()] + [((), rows) for rows in right.values()]
        pairs += [CellPair(names[cell], *side) for side in sides]
    return pairs


def _repeated(rows: Sequence[Record]) -> tuple[Record, ...]:
    """Return the newest of some rows, after the rows that it repeats: runs of the same code on the same host."""
    *older, newest = rows
    names = [name for name in (*MUST_AGREE, *_CODE, "host", BESIDE) if name != "memory_limit_gib"]

    def repeats(row: Record) -> bool:
        return is_measurement(row) and all(row.get(name) == newest.get(name) for name in names)

    return (*(filter(repeats, older) if is_measurement(newest) else ()), newest)


def rows_by_cell(frame: pd.DataFrame) -> dict[CellIdentity, dict[Any, list[Record]]]:
    """Return the rows of each cell by hardware, oldest first. Failures beside a measurement are left out."""
    frame = comparable(frame)
    frame = frame.drop(replaced_rows(frame))
    frame = frame.assign(hardware=hardware(frame)["hardware"], when=frame["finished_at"].fillna(frame["started_at"]))
    frame = frame.sort_values("when", kind="stable", na_position="first")
    cells: dict[CellIdentity, dict[Any, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in plain_rows(frame):
        cells[_identity(record)][record["hardware"]].append(record)
    return cells


def _identity(record: Record) -> CellIdentity:
    """Return the whole problem of a cell, options included. It does not depend on the defaults of the configuration."""
    workload = workloads().get(record["workload"])
    problem = dict.fromkeys(("loss", "dtype", "vocab", "tokens"))
    if workload:
        problem = problem_fields(workload) | problem_identity(workload)
    defaults = dict.fromkeys(_ALWAYS) | problem | {"dp_size": 1, "nodes": 1, "graph": False, "fresh": False}
    values = {name: default if record.get(name) is None else record[name] for name, default in defaults.items()}
    plain = (bool, int, float, type(None))
    return tuple(
        (name, value if name != "block_cap" and isinstance(value, plain) else str(value))
        for name, value in values.items()
    )


def cell_names(cells: Iterable[CellIdentity]) -> dict[CellIdentity, str]:
    """Return the name of each cell: its variant, and the fields in which cells differ."""
    cells = list(cells)
    seen: dict[str, set[Any]] = defaultdict(set)
    for cell in cells:
        for name, value in cell:
            seen[name].add(value)
    defaults = {option for workload in workloads().values() for option in workload.option_defaults.items()}
    shown = [name for name in seen if name != "variant" and (name in _ALWAYS_NAMED or len(seen[name]) > 1)]
    shown.sort(key=lambda name: _NAMED_FIRST.index(name) if name in _NAMED_FIRST else len(_NAMED_FIRST))
    names = {}
    for cell in cells:
        values = dict(cell)
        words = [
            f"{column_label(name)}={value_text(values[name])}"
            for name in shown
            if values.get(name) is not None and (name, values[name]) not in defaults
        ]
        names[cell] = " ".join([value_text(values["variant"]), *words])
    return names


def differences(before: Record, after: Record, allowed: Iterable[str] = ()) -> list[str]:
    """Return why two rows must not be compared: differences in hardware, software and method."""
    skipped = {*allowed, "memory_limit_gib" if before.get("device") == "cpu" else "cpu_model"}
    return _differing([name for name in ACROSS if name not in skipped], before, after)


def remarks(before: Sequence[Record], after: Sequence[Record], allowed: Iterable[str] = ()) -> list[str]:
    """Return differences between the runs of a cell that permit a comparison but must be noted."""
    old, new = before[-1], after[-1]
    notes = _differing([*_NOTED, *(name for name in ACROSS if name in allowed)], old, new)
    for mark in (HOST_BOUND, THROTTLED, BELOW_FLOOR):
        sides = [side for side, row in (("before", old), ("after", new)) if mark in remark_marks(row)]
        notes += [f"{mark_word(mark)} {' and '.join(sides)}"] if sides else []
    processes = _processes(before), _processes(after)
    if processes[0] != processes[1]:
        notes.append(f"{processes[0]} processes before, {processes[1]} processes after")
    for name, meaning in _SPEEDS.items():
        if old.get(name) and new.get(name) and abs(new[name] / old[name] - 1) > _SPEED_SHARE:
            notes.append(f"{meaning} {new[name] / old[name] - 1:+.0%}")
    return notes


def _processes(rows: Sequence[Record]) -> str:
    """Return "warm" if earlier jobs ran in the processes or their torchrun, "cold" if none did."""
    warm = {bool(row.get("warm") or row.get("jobs_before")) for row in rows}
    return "cold and warm" if len(warm) > 1 else "warm" if warm == {True} else "cold"


def _differing(names: Iterable[str], before: Record, after: Record) -> list[str]:
    """Return the columns in which two rows differ, with both values. A missing value doesn't count as a difference."""
    notes = []
    for name in names:
        old, new = before.get(name), after.get(name)
        if name == BESIDE:
            sides = [side for side, value in (("before", old), ("after", new)) if value]
            notes += [f"other jobs ran beside it {' and '.join(sides)}"] if sides else []
        elif old is not None and new is not None and old != new:
            left, right = (value_text(value)[: 12 if name in _CODE else None] for value in (old, new))
            notes.append(f"{name} {left} and {right}")
    return notes
