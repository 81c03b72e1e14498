"""Rows as JSON files, in the form that a workload's users know from older tools."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pandas as pd

from tpbench.results.cells import newest
from tpbench.results.plain import plain_rows
from tpbench.settings import JobError
from tpbench.workloads import workloads


def documents(frame: pd.DataFrame, folder: Path, *, all_rows: bool = False) -> list[Path]:
    """Write a file into `folder` for the newest row of each cell, or every row, whose workload has such a form.

    Files that would have one name are told apart by their rows' names. Raises JobError where there is nothing to write.
    """
    known = workloads()
    made = []
    for row in plain_rows(frame if all_rows else newest(frame)):
        workload = known.get(row["workload"])
        found = workload.document(row) if workload else None
        if found is not None:
            made.append((*found, str(row["row_id"])))
    if not made:
        raise JobError("--format json: none of these rows is a right one of a workload that has such a form")
    times = Counter(name for name, _, _ in made)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content, row_id in made:
        file = folder / f"{name if times[name] == 1 else f'{name}_{row_id}'}.json"
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        print(f"report: wrote {file}", file=sys.stderr)
        written.append(file)
    return written
