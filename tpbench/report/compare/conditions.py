"""Conditions of a measurement that two rows of one cell share or not: hardware, software, process and clocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tpbench.report.analysis.records import (
    BELOW_FLOOR,
    HOST_BOUND,
    THROTTLED,
    Record,
    is_measurement,
    remark_marks,
    value_text,
)

MUST_AGREE = (
    "gpu_name", "cpu_model", "driver_version", "cuda_version", "nccl_version", "torch_version", "triton_version",
    "python_version", "backend", "interpreted", "warmed_up", "memory_limit_gib",
)  # fmt: skip
"""Columns that must be equal for two rows to be compared, if both rows have them.

The model of the CPU counts on a CPU only. The memory limit counts on a GPU only, because on a CPU it is the memory that
was free. Versions of tpbench and its kernels may differ, because a comparison shows their effect."""
_CODE = ("tpbench_version", "kernels_version", "variant_version", "git_commit", "git_dirty")
NOTED = ("host", "gpu_count", *_CODE)
"""Columns whose difference is noted but permitted."""
_SPEEDS = {
    "copy_gb_per_s": "copy bandwidth of the machine",
    "sm_clock_mhz": "clock of the GPU",
    "memory_clock_mhz": "clock of the GPU's memory",
}
_SPEED_SHARE = 0.03
_SHOWN_CHARACTERS = 12
BESIDE = "beside"
"""Column with the jobs that ran on the host at the same time. Two rows are compared only if both ran alone."""
ACROSS = (*MUST_AGREE, BESIDE)
"""Columns whose difference a user may allow."""


def repeats(row: Record, newest: Record) -> bool:
    """Return true if two rows of a cell are runs of the same code under the same conditions, or the same row."""
    if row is newest:
        return True
    names = (*MUST_AGREE, *_CODE, "host", BESIDE)
    alike = all(row.get(name) == newest.get(name) for name in names if name != "memory_limit_gib")
    return alike and is_measurement(row) and is_measurement(newest)


def differences(before: Record, after: Record, allowed: Iterable[str] = ()) -> list[str]:
    """Return why two rows must not be compared: differences in hardware, software and method."""
    cpu = before.get("device") == "cpu"
    skipped = {*allowed, "memory_limit_gib" if cpu else "cpu_model"}
    found = [_both(name, before, after) for name in MUST_AGREE if name not in skipped and _differ(name, before, after)]
    if BESIDE not in skipped:
        found += _other_jobs(before, after)
    return found


def remarks(before: Sequence[Record], after: Sequence[Record], allowed: Iterable[str] = ()) -> list[str]:
    """Return differences between the runs of a cell that permit a comparison but must be noted."""
    old, new = before[-1], after[-1]
    allowed = set(allowed)
    names = [*NOTED, *(name for name in MUST_AGREE if name in allowed)]
    found = [_both(name, old, new) for name in names if _differ(name, old, new)]
    if BESIDE in allowed:
        found += _other_jobs(old, new)
    for mark, words in (
        (HOST_BOUND, "bound by the host"),
        (THROTTLED, "throttled"),
        (BELOW_FLOOR, "faster than its floor"),
    ):
        sides = [side for side, row in (("before", old), ("after", new)) if mark in remark_marks(row)]
        found += [f"{words} {' and '.join(sides)}"] if sides else []
    processes = _processes(before), _processes(after)
    if processes[0] != processes[1]:
        found.append(f"{processes[0]} processes before, {processes[1]} processes after")
    for name, meaning in _SPEEDS.items():
        if old.get(name) and new.get(name) and abs(new[name] / old[name] - 1) > _SPEED_SHARE:
            found.append(f"{meaning} {new[name] / old[name] - 1:+.0%}")
    return found


def _processes(rows: Sequence[Record]) -> str:
    """Return "warm" if earlier jobs ran in the processes or their torchrun, "cold" if none did."""
    warm = {bool(row.get("warm") or row.get("jobs_before")) for row in rows}
    return "cold and warm" if len(warm) > 1 else "warm" if warm == {True} else "cold"


def _other_jobs(before: Record, after: Record) -> list[str]:
    shared = [name for name, record in (("before", before), ("after", after)) if record.get(BESIDE)]
    return [f"other jobs ran beside it {' and '.join(shared)}"] if shared else []


def _both(name: str, before: Record, after: Record) -> str:
    if name == "git_dirty":
        return f"uncommitted changes {'before' if before[name] else 'after'}"
    return f"{name} {_short(name, before[name])} and {_short(name, after[name])}"


def _short(name: str, value: Any) -> str:
    return value_text(value)[:_SHOWN_CHARACTERS] if name in _CODE else value_text(value)


def _differ(name: str, before: Record, after: Record) -> bool:
    old, new = before.get(name), after.get(name)
    return old is not None and new is not None and old != new
