"""`scripts/collect.py SWEEP_DIR`: what became of the jobs of a sweep that was left to Slurm."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tpbench.fields import JobError
from tpbench.launcher.attempt import FAILURES, Attempt
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.submitted import Submitted, attempts_of
from tpbench.report.escape import plain

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
    if not (attempts := attempts_of(sweep)):
        parser.error(f"{sweep} is no sweep's folder: it holds no cells")
    try:
        return _collect(attempts)
    except JobError as error:
        parser.error(str(error))


def _collect(attempts: Sequence[Attempt]) -> int:
    submitted = [Submitted.find(each) for each in attempts]
    states = cluster.states(each.job_id for each in submitted if each.wanted and not each.attempt.has_row)
    failed = busy = 0
    for each in submitted:
        state = states.get(each.job_id, "UNKNOWN")
        if outcome := each.outcome(state):
            result = " ".join(filter(None, (outcome.status, str(outcome.row["reason"] or "").partition("\n")[0])))
            failed += outcome.status in FAILURES
        else:
            result = f"job {each.job_id}, {state.lower()}" if each.wanted else NO_JOB
            busy += 1
        print(plain(f"{each.attempt.folder.name}: {each.attempt.cell.job}: {result}"))
    print(f"{len(attempts)} cells: {len(attempts) - busy} done, {failed} of them failed, {busy} not done yet")
    return 3 if busy else int(failed > 0)
