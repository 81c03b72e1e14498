"""Rows as JSON files, in a format that users of a workload know from older tools."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd

from tpbench.results.current_rows import newest
from tpbench.results.read import plain_rows
from tpbench.settings import JobError
from tpbench.workloads import workloads


def write_documents(frame: pd.DataFrame, folder: Path, *, all_rows: bool = False) -> list[Path]:
    """Write a JSON file for the newest row of each cell, or for every row, whose workload defines a document.

    The oldest row gets the plain name. If another result has that file already, the name gets the id of the row. Raises
    JobError if there is nothing to write.
    """
    known = workloads()
    documents = []
    for row in plain_rows(frame if all_rows else newest(frame)):
        workload = known.get(row["workload"])
        named = workload.document(row) if workload else None
        if named is not None:
            documents.append((*named, str(row["row_id"])))
    if not documents:
        raise JobError("--format json: none of these rows is a correct row of a workload with JSON documents")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content, row_id in sorted(documents, key=lambda document: document[2]):
        text = json.dumps(content, indent=2) + "\n"
        file = folder / f"{name}.json"
        if file.exists() and file.read_text(encoding="utf-8") != text:
            file = folder / f"{name}_{row_id}.json"
        file.write_text(text, encoding="utf-8")
        print(f"report: wrote {file}", file=sys.stderr)
        written.append(file)
    return written
