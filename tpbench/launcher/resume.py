"""Decide which cells a resumed sweep runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tpbench.launcher.plan import Cell
from tpbench.results.cells import MEASURED, changes, yields
from tpbench.results.plain import plain_rows
from tpbench.results.read import load

FACT_LABELS = {
    "kernels_version": "tpbench's kernels", "torch_version": "torch", "triton_version": "triton", "gpu_name": "GPU",
    "driver_version": "driver", "cpu_model": "CPU",
}  # fmt: skip
"""Columns whose change makes a row stale, with their names in messages."""


@dataclass(frozen=True)
class ResumeDecision:
    """Decision on one cell before it runs."""

    reason: str
    """Message to the user: why the cell runs, or why not."""
    row: Mapping[str, Any] | None = None
    """Stored row that is used instead of running the cell, or None if the cell runs."""
    superseded: Sequence[Mapping[str, Any]] = ()
    """Rows of failed and skipped attempts. The stored row, or the row of the coming run, replaces them."""


def decide(cells: Sequence[Cell], facts: Mapping[str, Any]) -> dict[int, ResumeDecision]:
    """Return a decision for each cell, by its index, from the rows on disk.

    `facts` are columns of this machine. A missing column counts as unchanged: the submitting host of a cluster does
    not know the cluster's GPUs.
    """
    stored: dict[tuple[str, str], pd.DataFrame] = {}
    for output_dir in {cell.job.output_dir for cell in cells}:
        for key, rows in load(output_dir).sort_values("finished_at", kind="stable").groupby("key", sort=False):
            stored[output_dir, str(key)] = rows
    return {cell.index: _decide(cell, stored.get((cell.job.output_dir, cell.job.key)), facts) for cell in cells}


def superseded(row: Mapping[str, Any], rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of failed and skipped attempts at the same cell that `row` replaces."""
    return [each for each in plain_rows(rows[rows["key"] == row["key"]]) if yields(each, row)]


def _decide(cell: Cell, rows: pd.DataFrame | None, facts: Mapping[str, Any]) -> ResumeDecision:
    if rows is None:
        return ResumeDecision("missing: has no row yet")
    current = [row for row in plain_rows(rows) if not changes(row, facts)]
    if not current:
        newest = plain_rows(rows.tail(1))[0]
        return ResumeDecision(f"stale: {', '.join(_change(newest, name, facts) for name in changes(newest, facts))}")
    measured = [row for row in current if row["status"] in MEASURED]
    row = (measured or current)[-1]
    if measured or (row["status"] == "skipped" and cell.skip_reason):
        return ResumeDecision("measured before", row, superseded(row, rows))
    prefix = "skipped before:" if row["status"] == "skipped" else f"failed: {row['status']},"
    reason = f"{prefix} {str(row['reason'] or '').partition(chr(10))[0]}"
    return ResumeDecision(reason, superseded=current)


def _change(row: Mapping[str, Any], name: str, facts: Mapping[str, Any]) -> str:
    return f"{FACT_LABELS[name]} was {row[name] or 'none'}, is {facts[name] or 'none'}"
