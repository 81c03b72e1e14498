"""Notes of tables whose rows mix hosts, commits or kernel versions."""

from __future__ import annotations

from collections.abc import Iterable

from tpbench.report.grids import RecordGrid
from tpbench.report.records import Record, value_text

PROVENANCE = {"host": "hosts", "git_commit": "commits", "kernels_version": "kernel versions"}
"""Columns in which rows of a table should agree, with the plural of their meaning."""


def mixed(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return the columns of `PROVENANCE` in which records differ, with their values. A missing value is no other."""
    found = list(records)
    values = {name: sorted({value_text(record[name]) for record in found if record[name]}) for name in PROVENANCE}
    return {name: distinct for name, distinct in values.items() if len(distinct) > 1}


def mixing_note(grid: RecordGrid) -> str:
    """Return a sentence about what the rows of a grid mix, and how many problems compare such rows. Empty: nothing."""
    whole = mixed(cell.record for cell in grid.cells())
    if not whole:
        return ""
    hosts = f" ({', '.join(whole['host'])})" if "host" in whole else ""
    kinds = [f"{len(values)} {PROVENANCE[name]}{hosts if name == 'host' else ''}" for name, values in whole.items()]
    differing = sum(bool(mixed(record for record in row.records if record)) for row in grid.rows)
    compared = f"{differing} of {len(grid.rows)} problems compare" if differing else "no problem compares"
    return f"Rows are of {', '.join(kinds)}; {compared} rows that differ in these"
