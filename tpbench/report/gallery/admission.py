"""Rows that the gallery does not show, each with the reason."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tpbench.job import Job
from tpbench.report.grids.records import Record
from tpbench.report.repeat_command import row_job
from tpbench.results.plain import plain_rows
from tpbench.results.printable import printable
from tpbench.settings import JobError

TOLERANCE = 0.05
"""Share by which a time may be below its floor. The bandwidths of the floor are measurements, too."""
_COLUMNS = (
    "row_id", "variant", "variant_version", "status", "time_ms", "device_ms", "floor_ms", "bytes_moved",
    "copy_gb_per_s", "kernels_version", "job",
)  # fmt: skip

_IDENTITY = (
    "workload", "variant", "dtype", "tokens", "vocab", "hidden", "ffn", "heads", "layers", "loss", "tp_size",
    "dp_size", "table_rows", "width", "model", "batch_size", "seq_length",
)  # fmt: skip
"""Columns that a row and its job have in common, and that its problem and its limits depend on."""


@dataclass(frozen=True)
class Refusal:
    """A row that is not shown."""

    row_id: str
    variant: str
    reason: str


def refusals(frame: pd.DataFrame, kernels_versions: Collection[str]) -> list[Refusal]:
    """Return the rows that must not be shown.

    Args:
        frame: rows as `load` returns them.
        kernels_versions: the versions of the kernels that the entry states.
    """
    errors = [name for name in frame.columns if name.endswith("_error")]
    records = plain_rows(frame.reindex(columns=list(dict.fromkeys((*_COLUMNS, *_IDENTITY, *errors)))))
    return [
        Refusal(str(record["row_id"]), printable(str(record["variant"]), 60), reason)
        for record in records
        if (reason := "; ".join(_reasons(record, kernels_versions)))
    ]


def _reasons(record: Record, kernels_versions: Collection[str]) -> Iterator[str]:
    version = record["kernels_version"]
    if version is not None and version not in kernels_versions:
        yield f"kernels_version {printable(str(version), 40)} is not among those that the entry states"
    if record["status"] != "ok":
        return
    try:
        job = row_job(record)
    except JobError as error:
        yield f"its job cannot be checked: {printable(str(error), 200)}"
        return
    if version is None and job.uses_triton:
        yield "no kernels_version"
    if other := [name for name in _IDENTITY if _differs(record, job, name)]:
        yield f"its job has another {' and '.join(other)}"
        return
    yield from _wrong_errors(record, job)
    floor_ms, *complaints = _floor(record, job)
    yield from complaints
    yield from _wrong_times(record, floor_ms)


def _differs(record: Record, job: Job, name: str) -> bool:
    """Return True if the row and its job have different values. Some columns only rows have, or only some workloads."""
    value, flat = record[name], job.flat()
    return value is not None and name in flat and str(value) != str(flat[name])


def _wrong_errors(record: Record, job: Job) -> Iterator[str]:
    """Yield a complaint about each error of the oracle that is missing, no number or above the workload's tolerance."""
    for name, limit in job.workload.error_limits(job.problem).items():
        error = record.get(name)
        if error is None:
            if name not in job.workload.may_lack_errors:
                yield f"no {name} from the oracle"
        elif not (math.isfinite(error) and error >= 0):
            yield f"{name} is no number"
        elif error > limit:
            yield f"{name} {error:.3g} is above {limit:.3g}, the tolerance of {job.problem.dtype}"


def _floor(record: Record, job: Job) -> Iterator[Any]:
    """Yield the floor in ms, at least the time of the unavoidable bytes, and complaints about it."""
    moved, rate, stored = record["bytes_moved"], record["copy_gb_per_s"], record["floor_ms"]
    if not moved or not rate or not all(math.isfinite(each) and each > 0 for each in (moved, rate)):
        yield 0.0
        yield "no floor: bytes_moved and copy_gb_per_s are needed"
        return
    bytes_ms = moved / rate / 1e6
    yield max(bytes_ms, stored or 0.0)
    if stored is not None and not stored >= bytes_ms * (1 - TOLERANCE):
        yield f"floor_ms {stored:.3g} is below the {bytes_ms:.3g} ms of its bytes_moved"
    least = job.workload.least_bytes(job.problem, job.tp_size)
    if moved < least * (1 - TOLERANCE):
        yield f"bytes_moved {moved} is below the {least} of its problem"


def _wrong_times(record: Record, floor_ms: float) -> Iterator[str]:
    times = {name: record[name] for name in ("time_ms", "device_ms") if record[name] is not None}
    if not times:
        yield "no time"
    for name, value in times.items():
        if not (math.isfinite(value) and value > 0):
            yield f"{name} is {value:g}"
        elif value < floor_ms * (1 - TOLERANCE):
            yield f"{name} {value:.4g} is below the floor of {floor_ms:.4g} ms"
