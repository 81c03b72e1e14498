"""Which cells a resumed sweep runs, which not, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tpbench.launcher.plan import Cell
from tpbench.results.cells import MEASURED, changes, yields
from tpbench.results.plain import plain_rows
from tpbench.results.read import load

WORDS = {
    "kernels_version": "tpbench's kernels", "torch_version": "torch", "triton_version": "triton", "gpu_name": "GPU",
    "driver_version": "driver", "cpu_model": "CPU",
}  # fmt: skip
"""What a person is told has changed."""


@dataclass(frozen=True)
class Verdict:
    """What is known of a cell before it runs."""

    why: str
    """In words for the person: why it runs, or why not."""
    row: Mapping[str, Any] | None = None
    """The row that makes running it superfluous."""
    failures: Sequence[Mapping[str, Any]] = ()
    """Rows of failed and skipped tries, in whose place that row is or the one to come will be."""


def verdicts(cells: Sequence[Cell], facts: Mapping[str, Any]) -> dict[int, Verdict]:
    """A verdict for each cell, by its index, from the rows on disk. `facts`: this machine's; what they do not hold
    (a cluster's GPUs are not known where jobs are submitted) is taken to be unchanged."""
    stored: dict[tuple[str, str], pd.DataFrame] = {}
    for output_dir in {cell.job.output_dir for cell in cells}:
        for key, rows in load(output_dir).sort_values("finished_at", kind="stable").groupby("key", sort=False):
            stored[output_dir, str(key)] = rows
    return {cell.index: _verdict(cell, stored.get((cell.job.output_dir, cell.job.key)), facts) for cell in cells}


def _verdict(cell: Cell, rows: pd.DataFrame | None, facts: Mapping[str, Any]) -> Verdict:
    if rows is None:
        return Verdict("missing: has no row yet")
    same = [row for row in plain_rows(rows) if not changes(row, facts)]
    if not same:
        newest = plain_rows(rows.tail(1))[0]
        return Verdict(f"stale: {', '.join(_said(newest, name, facts) for name in changes(newest, facts))}")
    measured = [row for row in same if row["status"] in MEASURED]
    row = (measured or same)[-1]
    if measured or (row["status"] == "skipped" and cell.obstacle):
        return Verdict("measured before", row, superseded(row, rows))
    why = "skipped before:" if row["status"] == "skipped" else f"failed: {row['status']},"
    return Verdict(f"{why} {_first_line(row)}", failures=same)


def superseded(row: Mapping[str, Any], rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Of these rows those of failed and skipped tries at the cell, in whose place that row is."""
    return [each for each in plain_rows(rows[rows["key"] == row["key"]]) if yields(each, row)]


def _said(row: Mapping[str, Any], name: str, facts: Mapping[str, Any]) -> str:
    return f"{WORDS[name]} was {row[name] or 'none'}, is {facts[name] or 'none'}"


def _first_line(row: Mapping[str, Any]) -> str:
    return str(row["reason"] or "").partition("\n")[0]
