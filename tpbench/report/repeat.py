"""`scripts/report.py PLACE --repeat ROW_ID`: the command that measures a row's cell again, printed or run.

A stored row loads no code. The command of a variant from outside this package is run only if the command line of the
report names that variant, as `--run variant=my_loss.py:fast_tp`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from tpbench.outside.variant import from_entry_point, from_file
from tpbench.report.compare import render
from tpbench.report.compare.changes import compare_cells
from tpbench.report.compare.pairs import pair_cells
from tpbench.report.grids.records import Record
from tpbench.report.repeat_command import is_from_outside, row_command, row_job
from tpbench.results.read import RowWarning, load, plain_rows
from tpbench.settings import JobError
from tpbench.suggestions import nearest, printable

THRESHOLD = 0.03
"""Smallest change of a repeated cell that counts, as in `report.py compare`."""
VARIANT = "variant="
FOLDER = "outputs"
"""Folder that a new row goes to."""


def repeat(frame: pd.DataFrame, row_id: str, *, run: str | None, metric: str) -> int:
    """Print the command that measures a row's cell again. With `run`, run it, and compare the new row with the old one.

    Args:
        frame: rows, of which one has the identifier `row_id`, or an identifier that begins or ends with it.
        run: None: print the command only. Else run it; its row goes to the folder `outputs`. The text is empty, or
            the variant as the command line names it: `variant=my_loss.py:fast_tp`.
        metric: name of the compared metric.

    Returns:
        The exit code: 0, or 1 if the cell got worse by more than 3% or fails now.

    Raises:
        JobError: no row or several rows have this identifier, the row has no command, or the command made no row.
    """
    stored = _row(frame, row_id)
    (record,) = plain_rows(stored)
    command = row_command(record)
    words = _own_python(command)
    if run:
        words = _with_variant(words, run, record)
    print(command, flush=True)
    if is_from_outside(record):
        _note_version(run or f"{VARIANT}{record['variant']}", record)
    if run is None:
        return 0
    if is_from_outside(record) and not run:
        name = printable(record["variant"], 100)
        raise JobError(f"a stored row may not load code: name the code yourself, as --run {VARIANT}{name}")
    key = row_job(record).key
    before = _identifiers(key)
    code = subprocess.run(["/usr/bin/env", *words, f"output_dir={FOLDER}"], check=False, stdout=sys.stderr).returncode
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


def _with_variant(words: Sequence[str], named: str, record: Record) -> list[str]:
    """Return the words of the command with the variant as the user named it. Raises JobError for another variant."""
    if not named.startswith(VARIANT):
        raise JobError(f"--run {named}: write folders before --run, and a variant of your own as {VARIANT}FILE.py:NAME")
    choice = named.removeprefix(VARIANT)
    if Path(choice).name != record["variant"]:
        raise JobError(f"the row is of {printable(record['variant'], 100)}, and --run names {choice}")
    return [named if word == f"{VARIANT}{record['variant']}" else word for word in words]


def _note_version(named: str, record: Record) -> None:
    """Print a note if the code of a variant from outside is not that of the row, or is not here. Nothing is loaded."""
    choice = named.removeprefix(VARIANT)
    path, _, function = choice.rpartition(":")
    try:
        found = from_file(Path(path).expanduser(), function) if path else from_entry_point(choice)
    except (JobError, ValueError, OSError):
        where = f"in the folder of {Path(path).name}" if path else "where its package is installed"
        print(f"report: run this command {where}", file=sys.stderr)
        return
    if found.version != record.get("variant_version"):
        print(f"report: {found.name} has changed since this row was measured", file=sys.stderr)


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
