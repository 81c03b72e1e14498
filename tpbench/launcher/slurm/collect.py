"""`scripts/collect.py SWEEP_DIR`: stores the rows of a sweep that was left to Slurm, and prints each cell's state."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tpbench.launcher.cells.attempt import Attempt
from tpbench.launcher.cells.leftovers import discard_rows
from tpbench.launcher.cells.locks import CellLocks
from tpbench.launcher.cells.outcome import FAILURES, Outcome
from tpbench.launcher.planning.plan import distinguish
from tpbench.launcher.planning.resume import superseded
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.submitted import Submitted, attempts_of
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
    submitted = [Submitted.find(each) for each in attempts]
    states = cluster.states(each.job_id for each in submitted if each.wanted and not each.attempt.has_row)
    outcomes = [each.outcome(states.get(each.job_id, "UNKNOWN")) for each in submitted]
    stored = {each: load(each) for each in {each.cell.job.output_dir for each in attempts} if Path(each).exists()}
    _tidy([each for each in outcomes if each], stored)
    failed = busy = 0
    cells = distinguish([each.cell for each in attempts])
    for each, outcome, cell in zip(submitted, outcomes, cells, strict=True):
        other_row = None if outcome or each.wanted else _row_of_another_sweep(each.attempt, stored)
        if row := outcome.row if outcome else other_row:
            reason = str(row["reason"] or "").partition("\n")[0]
            sweep = f"(sweep {row['sweep_id']})" if other_row else ""
            result = " ".join(filter(None, (str(row["status"]), reason, sweep)))
            failed += row["status"] in FAILURES
        else:
            state = states.get(each.job_id, cluster.UNKNOWN)
            result = f"job {each.job_id}, {state.text}" if each.wanted else NO_JOB
            busy += 1
        print(printable(f"{each.attempt.folder.name}: {cell}: {result}"))
    print(f"{len(attempts)} cells: {len(attempts) - busy} done, {failed} of them failed, {busy} not done yet")
    return 3 if busy else int(failed > 0)


def _tidy(outcomes: Sequence[Outcome], stored: Mapping[str, pd.DataFrame]) -> None:
    """Delete the rows of failed attempts at cells that have another row now, unless a running sweep has the cell."""
    locks = CellLocks(stored)
    for each in outcomes:
        output_dir = each.cell.job.output_dir
        if each.row is None or output_dir not in stored:
            continue
        rows = stored[output_dir]
        failures = superseded(each.row, plain_rows(rows[rows["key"] == each.row["key"]]))
        if failures and locks.acquire(each.cell):
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
