"""Jobs that were submitted: by whom a cell is run, what became of it, and what earlier sweeps left behind."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from tpbench.launcher import failure
from tpbench.launcher.attempt import Attempt, Outcome
from tpbench.launcher.slurm.cluster import ENDED

JOB = "slurm_job"
"""A file in a cell's folder with the number of the job that runs it."""

SUBMITIT = "slurm"
"""submitit's folder in a sweep's."""

NOBODY = "nobody"
"""Stands for a job's number once a later sweep has taken the cell over, or has seen to the end of the job."""

ENDS = {
    "TIMEOUT": ("timeout", "at Slurm's time limit"),
    "CANCELLED": ("error", "because somebody cancelled it"),
    "OUT_OF_MEMORY": ("error", "because it took more memory than it had asked for"),
    "PREEMPTED": ("error", "for another job, and it was not requeued"),
    "NODE_FAIL": ("error", "with its node"),
    "GONE": ("error", "and Slurm does not know it any more"),
}
"""By Slurm's state: the status of a row that nobody lived to write, and how the job ended."""


@dataclass(frozen=True)
class Submitted:
    """An attempt in Slurm's hands."""

    attempt: Attempt
    job_id: str
    """Empty as long as no job is known."""

    @classmethod
    def find(cls, attempt: Attempt) -> Submitted:
        """By what is noted in the attempt's folder."""
        job = attempt.folder / JOB
        return cls(attempt, job.read_text() if job.exists() else "")

    @property
    def wanted(self) -> bool:
        """A job has it, of which a row is wanted."""
        return self.job_id not in ("", NOBODY) and not self.attempt.given_up

    def over(self) -> None:
        """Note that the job of a try that was given up has ended: nobody needs to see to its end again, when its number
        may be another job's."""
        (self.attempt.folder / JOB).write_text(NOBODY)

    def outcome(self, state: str) -> Outcome | None:
        """The outcome of a cell that has its row or, since its job has ended, never will; None for one at work and
        for one of which no row is wanted."""
        if self.attempt.has_row:
            return self.attempt.close("ok", "")
        if state not in ENDED or not self.wanted:
            return None
        status, how = ENDS.get(state, ("error", "before it could write a row"))
        submitits = self.attempt.folder.parent / SUBMITIT / f"{self.job_id}_0_log.err"
        words = failure.last_words(self.attempt.folder) or failure.tail(submitits)
        logs = f"; the last lines:\n{words}" if words else ""
        return self.attempt.close(status, f"Slurm job {self.job_id} ended {how} ({state}){logs}")


def record(folder: Path, job_id: str) -> bool:
    """Note that this job runs the cell. False where another does: whoever comes first, launcher or job, is in force."""
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
    """The last attempt at each cell of a sweep, in order; only of jobs with these keys, if any are given. Raises
    JobError for one that cannot be understood."""
    found = []
    for file in sweep.glob("*/cell.json"):
        try:
            key = json.loads(file.read_text())["known"]["key"]
        except (json.JSONDecodeError, FileNotFoundError):  # cut off as it was written: nothing ran; or swept away
            continue
        if keys is None or key in keys:
            found.append(Attempt.load(file.parent))
    # One that was begun anew without its companions has the number of the first beginning, and a longer name.
    found.sort(key=lambda each: (each.cell.index, each.row.known["tries"], each.folder.name))
    return list({each.cell.index: each for each in found}.values())


def unfinished(sweep: Path, keys: Set[str] | None = None) -> Iterator[Submitted]:
    """The attempts of a sweep that have no row yet."""
    return (Submitted.find(attempt) for attempt in attempts_of(sweep, keys) if not attempt.has_row)


def left_behind(output_dirs: Iterable[str], keys: Set[str]) -> Iterator[Submitted]:
    """Attempts of earlier sweeps at jobs with these keys that have no row yet but may still get one, those too
    that were given up."""
    for output_dir in output_dirs:
        for submitit in Path(output_dir, "sweeps").absolute().glob(f"*/{SUBMITIT}"):
            for each in unfinished(submitit.parent, keys):
                if not each.job_id:
                    record(each.attempt.folder, NOBODY)  # unless a job comes first
                    each = Submitted.find(each.attempt)
                if each.job_id != NOBODY:
                    yield each
