"""The conditions under which rows were measured: which of them must agree before two rows are compared."""

from collections.abc import Iterable, Sequence
from typing import Any

from tpbench.report.analysis import records
from tpbench.report.analysis.records import Record, value_text

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
_CODE = ("tpbench_version", "kernels_version", "variant_version", "git_commit", "git_dirty", "user_commit")
_NOTED = ("host", "gpu_count", "cpu_count", "package_versions", *_CODE)
"""Columns whose difference is noted but permitted. So are the recorded variables of the environment."""
_STACK = (*(name for name in ACROSS if name != "memory_limit_gib"), "package_versions", "host", *_CODE)
_OF_PLACE = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SPEEDS, _SPEED_SHARE = ("copy_gb_per_s", "sm_clock_mhz", "memory_clock_mhz"), 0.03
"""Columns of speeds, and the smallest difference that is noted."""


def stack(row: Record, *, on_any_host: bool = False) -> tuple[Any, ...]:
    """Return the code, the packages and the machine of a row. Rows with the same ones repeat each other."""
    return tuple(row.get(name) for name in _STACK if not (on_any_host and name == "host"))


def differences(before: Record, after: Record, allowed: Iterable[str] = ()) -> list[str]:
    """Return why two rows must not be compared: differences in hardware, software and method."""
    return _differing([name for name in _that_count(before) if name not in allowed], before, after)


def remarks(before: Sequence[Record], after: Sequence[Record], allowed: Iterable[str] = ()) -> list[str]:
    """Return differences between the runs of a cell that permit a comparison but must be noted."""
    old, new = before[-1], after[-1]
    notes = _differing([*_NOTED, *(name for name in _that_count(old) if name in allowed)], old, new)
    left, right = (records.json_object(row.get("environment")) for row in (old, new))
    for name in sorted({*left, *right} - {*_OF_PLACE}) if left and right else ():
        one, other = (value_text(variables.get(name, "unset")) for variables in (left, right))
        notes += [f"{name} {one} and {other}"] if one != other else []
    marks = {"before": records.remark_marks(old), "after": records.remark_marks(new)}
    for mark in dict.fromkeys("".join(marks.values())):
        sides = [side for side in marks if mark in marks[side]]
        notes.append(f"{records.mark_word(mark)} {' and '.join(sides)}")
    one, other = ("warm" if row.get("warm") or row.get("jobs_before") else "cold" for row in (old, new))
    if one != other:  # earlier jobs ran in the processes of one side, or in their torchrun
        notes.append(f"{one} processes before, {other} processes after")
    for name in _SPEEDS:
        if old.get(name) and new.get(name) and abs(new[name] / old[name] - 1) > _SPEED_SHARE:
            notes.append(f"{name} {new[name] / old[name] - 1:+.0%}")
    return notes


def _that_count(row: Record) -> list[str]:
    """Return the columns in which rows of this one's device must agree."""
    skipped = "memory_limit_gib" if row.get("device") == "cpu" else "cpu_model"
    return [name for name in ACROSS if name != skipped]


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
