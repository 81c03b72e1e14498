"""`scripts/collect.py SWEEP_DIR`: what became of the jobs of a sweep that was left to Slurm."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tpbench.launcher.attempt import FAILURES
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.submitted import Submitted, attempts_of, unfinished
from tpbench.report.escape import plain

NOT_SUBMITTED = "was not submitted: run the sweep again with resume=true"


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
    if not (folders := list(attempts_of(sweep))):
        parser.error(f"{sweep} is no sweep's folder: it holds no cells")
    open_ones = {each.attempt.folder: each for each in unfinished(sweep)}
    states = cluster.states(each.job_id for each in open_ones.values() if each.job_id) if open_ones else {}
    failed = busy = 0
    for attempt in folders:
        job_id = open_ones[attempt.folder].job_id if attempt.folder in open_ones else ""
        state = states.get(job_id, "UNKNOWN")
        if outcome := Submitted(attempt, job_id).outcome(state):
            result = " ".join(filter(None, (outcome.status, str(outcome.row["reason"] or "").partition("\n")[0])))
            failed += outcome.status in FAILURES
        else:
            result = f"job {job_id}, {state.lower()}" if job_id else NOT_SUBMITTED
            busy += 1
        print(plain(f"{attempt.folder.name}: {attempt.cell.job}: {result}"))
    print(f"{len(folders)} cells: {len(folders) - busy} done, {failed} of them failed, {busy} not done yet")
    return 3 if busy else int(failed > 0)
