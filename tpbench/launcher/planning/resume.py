"""Decide which cells a resumed sweep runs."""

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpbench.launcher.planning.plan import Cell
from tpbench.results.current_rows import MEASURED, differing_columns, is_replaced_by
from tpbench.results.read import load, plain_rows
from tpbench.suggestions import sentence_of


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
    """Return a decision for each cell, by its index, from the rows on disk and the facts of this machine, if known."""
    keys = {cell.job.key for cell in cells}
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for output_dir in {cell.job.output_dir for cell in cells}:
        with contextlib.suppress(FileNotFoundError):  # a dry run does not create the folder
            frame = load(output_dir)
            for row in plain_rows(frame[frame["key"].isin(keys)].sort_values("finished_at", kind="stable")):
                rows[output_dir, row["key"]].append(row)
    decisions = {}
    for cell in cells:
        # A skipped cell may lack the packages.
        versions = {name: value for name, value in cell.job.software.items() if value}
        known = {name: value for name, value in versions.items() if not cell.skip_reason or name != "package_versions"}
        decisions[cell.index] = _decide(cell, rows[cell.job.output_dir, cell.job.key], {**known, **facts})
    return decisions


def _decide(cell: Cell, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> ResumeDecision:
    """Return the decision on a cell from its rows, the newest last."""
    if not rows:
        return ResumeDecision("missing: has no row yet")
    current = [row for row in rows if not differing_columns(row, facts)]
    if not current:
        last = rows[-1]
        names = differing_columns(last, facts)
        changed = (f"{name} was {last[name] or 'none'}, is {facts[name] or 'none'}" for name in names)
        return ResumeDecision(f"stale: {', '.join(changed)}")
    measured = [row for row in current if row["status"] in MEASURED]
    row = (measured or current)[-1]
    refused_on_ranks = row["backend"] is not None  # only ranks know the backend: the variant's own code refused
    if measured or (row["status"] == "skipped" and (cell.skip_reason or refused_on_ranks)):
        return ResumeDecision("measured before", row, [older for older in rows if is_replaced_by(older, row)])
    prefix = "skipped before:" if row["status"] == "skipped" else f"failed: {row['status']},"
    return ResumeDecision(f"{prefix} {sentence_of(row['reason'])}", superseded=current)
