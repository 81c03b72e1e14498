"""Rows that the gallery does not show, each with the reason."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import pandas as pd

from tpbench.report.records import Record
from tpbench.results.plain import plain_rows
from tpbench.results.printable import printable

TOLERANCE = 0.05
"""Share by which a time may be below its floor. The bandwidths of the floor are measurements, too."""
_ORACLE = ("loss_error", "grad_error")
_COLUMNS = ("row_id", "variant", "status", "time_ms", "device_ms", "floor_ms", "kernels_version", *_ORACLE)


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
    records = plain_rows(frame.reindex(columns=list(_COLUMNS)))
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
    errors = [record[name] for name in _ORACLE if record[name] is not None]
    if not errors:
        yield f"no error from the oracle ({' or '.join(_ORACLE)})"
    elif not all(math.isfinite(error) and error >= 0 for error in errors):
        yield "the oracle's error is no number"
    times = {name: record[name] for name in ("time_ms", "device_ms") if record[name] is not None}
    if not times:
        yield "no time"
    for name, value in times.items():
        if not (math.isfinite(value) and value > 0):
            yield f"{name} is {value:g}"
        elif record["floor_ms"] is not None and value < record["floor_ms"] * (1 - TOLERANCE):
            yield f"{name} {value:.4g} is below the floor of {record['floor_ms']:.4g} ms"
