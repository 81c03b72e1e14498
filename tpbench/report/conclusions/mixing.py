"""Notes of tables whose rows mix hosts, commits or kernel versions."""

from __future__ import annotations

from collections.abc import Iterable

from tpbench.report.grids.grid import RecordGrid
from tpbench.report.grids.records import Record, value_text
from tpbench.report.numbers.metric import counted

PROVENANCE = {"host": "hosts", "git_commit": "commits", "kernels_version": "kernel versions"}
"""Columns in which rows of a table should agree, with the plural of their meaning."""


def differing_provenance(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return the columns of `PROVENANCE` in which records differ, with their values. A missing value is no other."""
    records = list(records)
    values = {name: sorted({value_text(record[name]) for record in records if record[name]}) for name in PROVENANCE}
    return {name: distinct for name, distinct in values.items() if len(distinct) > 1}


def mixing_note(grid: RecordGrid, place: str = "This table") -> str:
    """Return a sentence about what the rows of a grid mix, and how many problems compare such rows. Empty: nothing.

    `place` is the subject of the sentence: what shows the grid.
    """
    mixed = differing_provenance(cell.record for cell in grid.cells())
    if not mixed:
        return ""
    hosts = f" ({', '.join(mixed['host'])})" if "host" in mixed else ""
    kinds = [f"{len(values)} {PROVENANCE[name]}{hosts if name == 'host' else ''}" for name, values in mixed.items()]
    listed = " and ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))
    which = "one of them" if len(kinds) > 1 else "them"
    differing = sum(bool(differing_provenance(record for record in row.records if record)) for row in grid.rows)
    if not differing:
        return f"{place} mixes {listed}; no problem compares rows that differ in {which}"
    problems = f"{differing} of {counted(len(grid.rows), 'problem')}"
    return f"{place} mixes {listed}; in {problems} the compared rows differ in {which}"
