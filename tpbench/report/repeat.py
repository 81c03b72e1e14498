"""`scripts/report.py PLACE --repeat ROW_ID`: the command that measures a row's cell again, printed or run."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import warnings

import pandas as pd

from tpbench.job import stored_job
from tpbench.report.compare import render
from tpbench.report.compare.changes import compare_cells
from tpbench.report.compare.pairs import pair_cells
from tpbench.report.repeat_command import is_from_file, row_command
from tpbench.results.plain import plain_rows
from tpbench.results.printable import printable
from tpbench.results.read import RowWarning, load
from tpbench.settings import JobError
from tpbench.suggestions import nearest

THRESHOLD = 0.03
"""Smallest change of a repeated cell that counts, as in `report.py compare`."""
FOLDER = "outputs"
"""Folder that a new row goes to."""


def repeat(frame: pd.DataFrame, row_id: str, *, run: bool, metric: str) -> int:
    """Print the command that measures a row's cell again. With `run`, run it, and compare the new row with the old one.

    Args:
        frame: rows, of which one has the identifier `row_id`, or an identifier that begins or ends with it.
        run: true if the command shall run. Its row goes to the folder `outputs`.
        metric: name of the compared metric.

    Returns:
        The exit code: 0, or 1 if the cell got worse by more than 3% or fails now.

    Raises:
        JobError: no row or several rows have this identifier, the row has no command, or the command made no row.
    """
    stored = _row(frame, row_id)
    (record,) = plain_rows(stored)
    command = row_command(record)
    print(command, flush=True)
    if not run:
        return 0
    if is_from_file(record["variant"]):
        raise JobError(f"a row loads no code: run this command yourself, in the folder of {record['variant']}")
    key = stored_job(json.loads(record["job"])).key
    before = _identifiers(key)
    code = subprocess.run(
        ["/usr/bin/env", *_own_python(command), f"output_dir={FOLDER}"], check=False, stdout=sys.stderr
    ).returncode
    new = [each for each in _identifiers(key) if each not in before]
    if not new:
        raise JobError(f"the command made no row (exit code {code}), so nothing was compared")
    comparison = compare_cells(pair_cells(stored, load(FOLDER, row_id=new)), metric, THRESHOLD, ())
    sys.stdout.write(render.text(comparison))
    if not comparison.decided:
        raise JobError("nothing was compared, so this is no pass")
    return int(any(change.fails() for change in comparison.changes))


def _own_python(command: str) -> list[str]:
    """Return the words of a command with this process's interpreter in place of `python`."""
    return [sys.executable if word == "python" else word for word in shlex.split(command)]


def _row(frame: pd.DataFrame, row_id: str) -> pd.DataFrame:
    """Return the one row with this identifier. The beginning or the end of the identifier is enough."""
    names = frame["row_id"].astype(str)
    found = frame[names == row_id]
    if found.empty and len(row_id) >= 4:
        found = frame[names.str.startswith(row_id) | names.str.endswith(row_id)]
    shown = printable(row_id, 100)
    if found.empty:
        raise JobError(f"no row has the identifier {shown}{nearest(row_id, names, most=3)} (column row_id)")
    if len(found) > 1:
        raise JobError(f"{len(found)} rows match {shown}: {', '.join(found['row_id'].head(3))}: name one of them whole")
    return found


def _identifiers(key: str) -> list[str]:
    """Return the identifiers of the stored rows of a job, oldest first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RowWarning)  # the report has printed the warnings of its own folders
        try:
            return list(load(FOLDER, key=key, columns=["row_id"])["row_id"])
        except FileNotFoundError:
            return []
