"""`scripts/collect.py SWEEP_DIR`: what became of the jobs of a sweep that was left to Slurm."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from tpbench.launcher.attempt import FAILURES, Attempt, Outcome, discard
from tpbench.launcher.locks import Claims
from tpbench.launcher.plan import told_apart
from tpbench.launcher.resume import superseded
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.submitted import Submitted, attempts_of
from tpbench.report.escape import printable
from tpbench.results.cells import MEASURED, changes, newest
from tpbench.results.plain import plain_rows
from tpbench.results.read import load
from tpbench.settings import JobError

NO_JOB = "no job runs it: run the sweep again with resume=true"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the rows of jobs that died without one. Exits 0 when all cells ended well, 1 when one failed, and 3 when
    some are not done yet."""
    parser = argparse.ArgumentParser(
        prog="collect.py",
        description="Write the rows of Slurm jobs that died without one, and say of each cell how it stands.",
        epilog="Exits with 0 when all cells ended well, 1 when one failed, 3 when some are not done yet.",
    )
    parser.add_argument("sweep", type=Path, help="a sweep's folder: OUTPUT_DIR/sweeps/SWEEP_ID")
    sweep: Path = parser.parse_args(arguments).sweep.absolute()
    try:
        if not (attempts := attempts_of(sweep)):
            parser.error(f"{sweep} is no sweep's folder: it holds no cells")
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
    cells = told_apart([each.cell for each in attempts])
    for each, outcome, cell in zip(submitted, outcomes, cells, strict=True):
        others = None if outcome or each.wanted else _of_another(each.attempt, stored)
        if row := outcome.row if outcome else others:
            reason = str(row["reason"] or "").partition("\n")[0]
            result = " ".join(
                filter(None, (str(row["status"]), reason, f"(sweep {row['sweep_id']})" if others else ""))
            )
            failed += row["status"] in FAILURES
        else:
            state = states.get(each.job_id, cluster.UNKNOWN)
            result = f"job {each.job_id}, {state.words}" if each.wanted else NO_JOB
            busy += 1
        print(printable(f"{each.attempt.folder.name}: {cell}: {result}"))
    print(f"{len(attempts)} cells: {len(attempts) - busy} done, {failed} of them failed, {busy} not done yet")
    return 3 if busy else int(failed > 0)


def _tidy(outcomes: Sequence[Outcome], stored: Mapping[str, pd.DataFrame]) -> None:
    """Take away failures in whose place there is a row now. Where a living sweep has the cell, that will do it."""
    claims = Claims(stored)
    for each in outcomes:
        output_dir = each.cell.job.output_dir
        failures = superseded(each.row, stored[output_dir]) if output_dir in stored else []
        if failures and claims.take(each.cell):
            for failure in failures:
                with contextlib.suppress(OSError):  # of another user, say: both stay
                    discard(output_dir, failure)
    claims.close()


def _of_another(attempt: Attempt, stored: Mapping[str, pd.DataFrame]) -> dict[str, Any] | None:
    """The row that another sweep has of a cell of whose try here none is wanted: of a later one, or a measurement that
    made the try superfluous."""
    rows = stored.get(attempt.cell.job.output_dir)
    if rows is None:
        return None
    begun = datetime.fromisoformat(attempt.row.known["started_at"])
    rows = rows[rows["key"] == attempt.cell.job.key]
    stands = [
        row["started_at"] > begun or (row["status"] in MEASURED and not changes(row, attempt.row.known))
        for row in plain_rows(rows)
    ]
    found = plain_rows(newest(rows.loc[stands]).sort_values("finished_at").tail(1))
    return found[0] if found else None
