"""`scripts/collect.py SWEEP_DIR`: stores the rows of a sweep that was left to Slurm, and prints each cell's state."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tpbench.launcher.attempt import FAILURES, Attempt, discard_rows
from tpbench.launcher.claims import CellLocks
from tpbench.launcher.planning.plan import distinguish
from tpbench.launcher.planning.resume import superseded
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.submitted import attempts_of, closed, is_wanted, job_of
from tpbench.results.current_rows import MEASURED, changes, newest
from tpbench.results.read import load, plain_rows
from tpbench.settings import JobError
from tpbench.suggestions import printable

NO_JOB = "no job runs it: run the sweep again with resume=true"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the rows of jobs that ended without one.

    The exit code is 0 if all cells ended well, 1 if one failed, and 3 if some are not done yet.
    """
    parser = argparse.ArgumentParser(
        prog="collect.py",
        description="Write the rows of Slurm jobs that ended without one, and print the state of each cell.",
        epilog="The exit code is 0 if all cells ended well, 1 if one failed, 3 if some are not done yet.",
    )
    parser.add_argument("sweep", type=Path, help="a sweep's folder: OUTPUT_DIR/sweeps/SWEEP_ID")
    sweep: Path = parser.parse_args(arguments).sweep.absolute()
    try:
        if not (attempts := attempts_of(sweep)):
            parser.error(f"{sweep} is no sweep's folder: it contains no cells")
        return _collect(attempts)
    except JobError as error:
        parser.error(str(error))


def _collect(attempts: Sequence[Attempt]) -> int:
    wanted = {attempt.folder: job_of(attempt) for attempt in attempts if is_wanted(attempt)}
    states = cluster.states(
        wanted[attempt.folder] for attempt in attempts if attempt.folder in wanted and not attempt.has_row
    )
    ended = [closed(attempt, states.get(job_of(attempt), "UNKNOWN")) for attempt in attempts]
    output_dirs = {attempt.cell.job.output_dir for attempt in attempts}
    stored = {output_dir: load(output_dir) for output_dir in output_dirs if Path(output_dir).exists()}
    _tidy([attempt for attempt in ended if attempt], stored)
    failed = busy = 0
    cells = distinguish([attempt.cell for attempt in attempts])
    for attempt, done, cell in zip(attempts, ended, cells, strict=True):
        job_id = wanted.get(attempt.folder)
        other_row = None if done or job_id else _row_of_another_sweep(attempt, stored)
        if row := done.row if done else other_row:
            reason = str(row["reason"] or "").partition("\n")[0]
            sweep = f"(sweep {row['sweep_id']})" if other_row else ""
            result = " ".join(filter(None, (str(row["status"]), reason, sweep)))
            failed += row["status"] in FAILURES
        else:
            state = states.get(str(job_id), cluster.UNKNOWN)
            result = f"job {job_id}, {state.text}" if job_id else NO_JOB
            busy += 1
        print(printable(f"{attempt.folder.name}: {cell}: {result}"))
    print(f"{len(attempts)} cells: {len(attempts) - busy} done, {failed} of them failed, {busy} not done yet")
    return 3 if busy else int(failed > 0)


def _tidy(ended: Sequence[Attempt], stored: Mapping[str, pd.DataFrame]) -> None:
    """Delete the rows of failed attempts at cells that have another row now, unless a running sweep has the cell."""
    locks = CellLocks(stored)
    for attempt in ended:
        output_dir = attempt.cell.job.output_dir
        if attempt.row is None or output_dir not in stored:
            continue
        rows = stored[output_dir]
        failures = superseded(attempt.row, plain_rows(rows[rows["key"] == attempt.row["key"]]))
        if failures and locks.acquire(attempt.cell):
            with contextlib.suppress(OSError):  # a row of another user: both stay
                discard_rows(output_dir, failures)
    locks.close()


def _row_of_another_sweep(attempt: Attempt, stored: Mapping[str, pd.DataFrame]) -> dict[str, Any] | None:
    """Return the row that another sweep has of a cell whose attempt here was abandoned.

    It is a later row, or a measurement that made the attempt superfluous.
    """
    rows = stored.get(attempt.cell.job.output_dir)
    if rows is None:
        return None
    rows = rows[rows["key"] == attempt.cell.job.key]
    replaces = [
        row["started_at"] > attempt.task.started_at
        or (row["status"] in MEASURED and not changes(row, attempt.task.columns))
        for row in plain_rows(rows)
    ]
    found = plain_rows(newest(rows.loc[replaces]).sort_values("finished_at").tail(1))
    return found[0] if found else None
