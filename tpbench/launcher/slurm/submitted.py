"""Jobs in Slurm's queue: which job runs a cell, how it ended, and which jobs earlier sweeps left."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from tpbench.launcher.cells import failure
from tpbench.launcher.cells.attempt import Attempt
from tpbench.launcher.cells.outcome import Outcome
from tpbench.launcher.slurm.cluster import ENDED
from tpbench.worker.task import TASK_FILE

JOB = "slurm_job"
"""File in a cell's folder with the number of the job that runs the cell."""

SUBMITIT = "slurm"
"""Folder of submitit's files in the folder of a sweep."""

NO_JOB = "nobody"
"""Content of the file JOB, in place of a number, once a later sweep has taken over the cell or has ended the job."""

CAUSES = {
    "TIMEOUT": ("timeout", "at Slurm's time limit"),
    "CANCELLED": ("error", "because it was cancelled"),
    "OUT_OF_MEMORY": ("error", "because it took more memory than it had asked for"),
    "PREEMPTED": ("error", "because another job preempted it, and it was not requeued"),
    "NODE_FAIL": ("error", "because its node failed"),
    "GONE": ("error", "and Slurm does not know it any more"),
}
"""By Slurm's state: the status of a cell whose job ended without a result, and the cause of the job's end."""


@dataclass(frozen=True)
class Submitted:
    """An attempt that was submitted to Slurm."""

    attempt: Attempt
    job_id: str
    """The number of its job. Empty while no job is known."""

    @classmethod
    def find(cls, attempt: Attempt) -> Submitted:
        """Return the attempt with the job that its folder names."""
        job = attempt.folder / JOB
        return cls(attempt, job.read_text() if job.exists() else "")

    @property
    def wanted(self) -> bool:
        """True if a job runs the attempt, and the attempt was not abandoned."""
        return self.job_id not in ("", NO_JOB) and not self.attempt.abandoned

    def mark_ended(self) -> None:
        """Note that the job of an abandoned attempt has ended.

        No sweep may end it again: by then its number may belong to another job.
        """
        (self.attempt.folder / JOB).write_text(NO_JOB)

    def outcome(self, state: str) -> Outcome | None:
        """Return the outcome of a cell with a row, and of one whose job has ended.

        None: the job is not done, or the attempt was abandoned.
        """
        if self.attempt.has_row:
            return self.attempt.close()
        if state not in ENDED or not self.wanted:
            return None
        if self.attempt.has_result:
            return self.attempt.close()
        status, cause = CAUSES.get(state, ("error", "before it wrote a row"))
        submitit_log = self.attempt.folder.parent / SUBMITIT / f"{self.job_id}_0_log.err"
        lines = failure.last_lines(self.attempt.folder) or failure.tail(submitit_log)
        logs = f"; the last lines:\n{lines}" if lines else ""
        return self.attempt.close(status, f"Slurm job {self.job_id} ended {cause} ({state}){logs}")


def record(folder: Path, job_id: str) -> bool:
    """Note that this job runs the cell. Return False if another job does: the first note counts."""
    temporary = folder / f".{JOB}.{secrets.token_hex(4)}"
    temporary.write_text(job_id)
    try:
        os.link(temporary, folder / JOB)
    except FileExistsError:
        return (folder / JOB).read_text() == job_id
    finally:
        temporary.unlink()
    return True


def attempts_of(sweep: Path, keys: Set[str] | None = None) -> list[Attempt]:
    """Return the last attempt at each cell of a sweep, in order; only of jobs with these keys, if any are given.

    Raises JobError for a task that this version of tpbench does not understand.
    """
    attempts = []
    for file in sweep.glob(f"*/{TASK_FILE}"):
        try:
            key = json.loads(file.read_text())["columns"]["key"]
        except (json.JSONDecodeError, FileNotFoundError):  # cut off while it was written: nothing ran; or deleted
            continue
        if keys is None or key in keys:
            attempts.append(Attempt.load(file.parent))
    # A cell that was measured alone after interleaving has two folders of the same number: the longer name is later.
    attempts.sort(key=lambda each: (each.cell.index, each.task.columns["tries"], each.folder.name))
    return list({each.cell.index: each for each in attempts}.values())


def unfinished(sweep: Path, keys: Set[str] | None = None) -> Iterator[Submitted]:
    """Yield the attempts of a sweep that have no row yet."""
    return (Submitted.find(attempt) for attempt in attempts_of(sweep, keys) if not attempt.has_row)


def left_behind(output_dirs: Iterable[str], keys: Set[str]) -> Iterator[Submitted]:
    """Yield the attempts of earlier sweeps at jobs with these keys that have no row yet but may get one.

    Abandoned attempts are among them: their jobs may still run.
    """
    for output_dir in output_dirs:
        for submitit in Path(output_dir, "sweeps").absolute().glob(f"*/{SUBMITIT}"):
            for each in unfinished(submitit.parent, keys):
                if not each.job_id:
                    record(each.attempt.folder, NO_JOB)  # unless a job comes first
                    each = Submitted.find(each.attempt)
                if each.job_id != NO_JOB:
                    yield each
