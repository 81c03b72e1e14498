"""Series: the measured rows of one cell on one kind of hardware in time order, with their commits and packages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from tpbench.report.analysis.metrics import Metric
from tpbench.report.analysis.records import Record, is_measurement, value_text
from tpbench.report.compare.conditions import BESIDE
from tpbench.report.compare.pairs import cell_names, rows_by_cell
from tpbench.report.compare.uncertainty import Observation, observe
from tpbench.report.history.change_points import ChangePoint, change_points, run_scatter

STACK = (
    "git_commit", "git_dirty", "kernels_version", "variant_version", "tpbench_version", "torch_version",
    "triton_version", "driver_version", "cuda_version", "nccl_version", "python_version", "package_versions", "host",
)  # fmt: skip
"""Columns that name the code, the packages and the machine of a row."""
FAILED = ("oom", "wrong", "timeout", "error")


@dataclass(frozen=True)
class Period:
    """Rows of a series that follow each other with the same code, packages and machine."""

    rows: Sequence[Record]
    level: float
    """Geometric mean of the metric."""


@dataclass(frozen=True)
class Series:
    """A metric of one cell over time."""

    name: str
    rows: Sequence[Record]
    observed: Sequence[Observation]
    changes: Sequence[ChangePoint] = ()
    failure: Record | None = None
    """The newest row, if it failed after a measurement."""

    @property
    def periods(self) -> list[Period]:
        """The rows by code, packages and machine, in time order."""
        pairs = zip(self.rows, self.observed, strict=True)
        groups = [list(group) for _, group in itertools.groupby(pairs, key=lambda pair: _stack(pair[0]))]
        return [Period([row for row, _ in group], _level([each for _, each in group])) for group in groups]

    def level(self, start: int, end: int) -> float:
        """Return the geometric mean of the metric of rows `start` to `end - 1`."""
        return _level(self.observed[start:end])

    def differences(self, change: ChangePoint) -> list[str]:
        """Return the columns in which the rows before and after a change differ, each with both values."""
        before, after = self.rows[change.at - 1], self.rows[change.at]
        return [
            f"{name} {_short(name, before)} to {_short(name, after)}"
            for name in STACK
            if before.get(name) != after.get(name)
        ]


def all_series(frame: pd.DataFrame, shown: Metric, threshold: float) -> list[Series]:
    """Return the series of every cell and kind of hardware that has a measurement, with its changes.

    Rows beside which other jobs ran are left out.
    """
    cells = rows_by_cell(frame)
    names = cell_names(cells)
    several = len({machine for machines in cells.values() for machine in machines}) > 1
    found = []
    for cell, machines in cells.items():
        for machine, rows in machines.items():
            name = f"{names[cell]} on {value_text(machine)}" if several else names[cell]
            if series := _series(name, rows, shown):
                found.append(series)
    tests = sum(len(each.rows) - 1 for each in found)
    factor = run_scatter(each.observed for each in found)
    return [replace(each, changes=change_points(each.observed, threshold, tests, factor)) for each in found]


def _series(name: str, rows: Sequence[Record], shown: Metric) -> Series | None:
    measured = [
        (row, seen)
        for row in rows
        if is_measurement(row) and not row.get(BESIDE) and (seen := observe(row, shown)) is not None
    ]
    if not measured:
        return None
    kept, observed = zip(*measured, strict=True)
    return Series(name, kept, observed, failure=rows[-1] if rows[-1]["status"] in FAILED else None)


def _level(observed: Sequence[Observation]) -> float:
    return math.exp(float(np.mean([each.log for each in observed])))


def _stack(row: Record) -> tuple[object, ...]:
    return tuple(row.get(name) for name in STACK)


def _short(name: str, row: Record) -> str:
    text = value_text(row.get(name))
    return text[:8] if name in ("git_commit", "kernels_version", "variant_version") else text
