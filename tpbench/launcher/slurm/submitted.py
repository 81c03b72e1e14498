"""Attempts in Slurm's queue: which job runs one, how it ended, and which ones earlier sweeps left."""

import argparse
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from tpbench.files import replace_file
from tpbench.launcher.attempt import FAILURES, JOB_FILE, Attempt, abandon, attempts_in
from tpbench.launcher.failure import last_lines, tail
from tpbench.launcher.planning.plan import distinguish
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.cluster import ENDED
from tpbench.results.read import load, plain_rows
from tpbench.settings import JobError, user_path
from tpbench.suggestions import counted, printable, sentence_of, with_lines
from tpbench.worker.task import TASK_FILE

SUBMITIT = "slurm"  # folder of submitit's files in the folder of a sweep


def job_of(attempt: Attempt) -> str:
    """Return the number of the job that runs the attempt. Empty while no job is known."""
    try:
        return (attempt.folder / JOB_FILE).read_text()
    except FileNotFoundError:
        return ""


def is_wanted(attempt: Attempt) -> bool:
    """Return True if a job runs the attempt, and the attempt was not abandoned."""
    return bool(job_of(attempt)) and not attempt.abandoned


def record(attempt: Attempt, job_id: str) -> None:
    replace_file(attempt.task.folder / JOB_FILE, job_id)


def close_if_ended(attempt: Attempt, state: str) -> Attempt | None:
    """Return the attempt with its row, written now if its job ended without one. None: a row may come, or none may."""
    if not (attempt.has_row or (state in ENDED and is_wanted(attempt))):
        return None
    job_id = job_of(attempt)
    lines = last_lines(attempt.folder) or tail(attempt.folder.parent / SUBMITIT / f"{job_id}_0_log.err")
    status = "timeout" if state == "TIMEOUT" else "error"
    ended = "is unknown to Slurm now (cancelled?)" if state == "GONE" else f"ended as {state} before it wrote a row"
    return attempt.close(status, with_lines(f"Slurm job {job_id} {ended}", lines))


def attempts_of(sweep: Path) -> list[Attempt]:
    """Return the last attempt at each cell of a sweep, in order, of those that this version of tpbench understands."""
    attempts = attempts_in(file.parent for file in sweep.glob(f"*/{TASK_FILE}"))
    # An attempt that ran once more has another folder of the same number: the longer name is later.
    attempts.sort(key=lambda attempt: (attempt.cell.index, attempt.folder.name))
    return list({attempt.cell.index: attempt for attempt in attempts}.values())


def left_behind(output_dirs: Iterable[str], keys: Set[str]) -> Iterator[Attempt]:
    """Yield attempts of earlier sweeps at jobs with these keys that have no row, and abandoned ones that may run."""
    for output_dir in output_dirs:
        for submitit in Path(output_dir, "sweeps").absolute().glob(f"*/{SUBMITIT}"):
            for attempt in attempts_of(submitit.parent):
                if attempt.has_row or attempt.cell.job.key not in keys:
                    continue
                if job_of(attempt):
                    yield attempt
                else:
                    abandon(attempt.folder)  # its submission is in doubt


def main(arguments: Sequence[str]) -> int:
    """Write the rows of jobs that ended without one, and return the exit code. Raises JobError."""
    parser = argparse.ArgumentParser(
        prog="tpbench collect",
        description="Write the rows of Slurm jobs that ended without one, and print the state of each cell.",
        epilog="The exit code is 0 if all cells ended well, 1 if one failed, 3 if some are not done yet.",
    )
    parser.add_argument("sweep", type=user_path, help="a sweep's folder, OUTPUT_DIR/sweeps/SWEEP_ID")
    sweep: Path = parser.parse_args(arguments).sweep.absolute()
    cluster.drop_client_variables()
    if not (attempts := attempts_of(sweep)):
        sweeps = "\n".join(map(str, sorted(sweep.glob("sweeps/*/"))))
        found = f". The sweeps in it are\n{sweeps}" if sweeps else ""
        raise JobError(f"{sweep} isn't the folder of a sweep: it has no cells that this version understands{found}")
    return _collect(attempts)


def _collect(attempts: Sequence[Attempt]) -> int:
    states = cluster.states({job_of(attempt) for attempt in attempts if is_wanted(attempt) and not attempt.has_row})
    newest: dict[str, Mapping[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError):
        folders = sorted({attempt.cell.job.output_dir for attempt in attempts})
        rows = load(folders, columns=["key", "status", "reason", "finished_at"])
        newest = {row["key"]: row for row in plain_rows(rows.sort_values("finished_at"))}
    failed = busy = 0
    for attempt, cell in zip(attempts, distinguish([attempt.cell for attempt in attempts]), strict=True):
        job_id = job_of(attempt) if is_wanted(attempt) else ""
        state = states.get(job_id, cluster.UNKNOWN)
        ended = close_if_ended(attempt, state)
        # Another sweep may have run the cell, or `compact` moved its row.
        if row := ended.row if ended else None if job_id else newest.get(cell.job.key):
            result = f"{row['status']} {sentence_of(row['reason'])}".strip()
            failed += row["status"] in FAILURES
        else:
            result = f"job {job_id}, {state}" if job_id else "no job runs it: run the sweep again with resume=true"
            busy += 1
        print(printable(f"{attempt.folder.name}: {cell}: {result}"))
    cells = counted(len(attempts), "cell")
    print(f"{cells}: {len(attempts) - busy} done, {failed} of them failed, {busy} not done yet")
    return 3 if busy else int(failed > 0)
