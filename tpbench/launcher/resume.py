"""Which cells a resumed sweep runs, which not, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tpbench.launcher.attempt import RETRIED
from tpbench.launcher.plan import Cell
from tpbench.results.plain import plain_rows
from tpbench.results.read import load

FINISHED = ("ok", "oom", "wrong", "skipped")

SOFTWARE = {"kernels_version": "tpbench's kernels", "torch_version": "torch", "triton_version": "triton"}
HARDWARE = {
    "cuda": {"gpu_name": "GPU", "driver_version": "driver"},
    "cpu": {"cpu_model": "CPU"},
}
"""By device. With the software and the resolved job (its key) this is what makes an old row stand for a cell."""


@dataclass(frozen=True)
class Verdict:
    """What is known of a cell before it runs."""

    why: str
    """In words for the person: why it runs, or why not."""
    row: pd.DataFrame | None = None
    """The row that makes running it superfluous."""
    failures: Sequence[Mapping[str, Any]] = ()
    """Rows of failed tries, in whose place that row is or the one to come will be."""


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
    same = [(index, row) for index, row in enumerate(plain_rows(rows)) if not _changes(cell, row, facts)]
    if not same:
        newest = plain_rows(rows.tail(1))[0]
        return Verdict(f"stale: {', '.join(_changes(cell, newest, facts))}")
    failures = [row for _, row in same if row["status"] in RETRIED]
    finished = [(index, row) for index, row in same if row["status"] in FINISHED]
    if not finished:
        return Verdict(f"failed: {failures[-1]['status']}, {_first_line(failures[-1])}", failures=failures)
    index, row = finished[-1]
    if row["status"] == "skipped" and not cell.obstacle:
        return Verdict(f"skipped before: {_first_line(row)}", failures=failures)
    return Verdict("measured before", rows.iloc[[index]], superseded(cell, row, rows))


def superseded(cell: Cell, row: Mapping[str, Any], rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Of these rows the cell's failures before that row of it, made as it was made."""
    facts = {name: row[name] for name in (*SOFTWARE, *HARDWARE[cell.job.device]) if row[name] is not None}
    before = (rows["key"] == cell.job.key) & (rows["finished_at"] < row["finished_at"])
    failures = plain_rows(rows[before & rows["status"].isin(RETRIED)])
    return [each for each in failures if not _changes(cell, each, facts)]


def _changes(cell: Cell, row: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """What is not as it was for that row. It knows no hardware if its job never got as far."""
    hardware = {name: label for name, label in HARDWARE[cell.job.device].items() if row[name] is not None}
    return [
        f"{label} was {row[name] or 'none'}, is {facts[name] or 'none'}"
        for name, label in {**SOFTWARE, **hardware}.items()
        if name in facts and row[name] != facts[name]
    ]


def _first_line(row: Mapping[str, Any]) -> str:
    return str(row["reason"] or "").partition("\n")[0]
