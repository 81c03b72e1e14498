"""Slurm's commands: states of jobs, limits, cancellation."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterable, Sequence

from tpbench.launcher import interrupts
from tpbench.settings import JobError

ENDED = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
     "REVOKED", "GONE")
)  # fmt: skip
"""Final states of a job. GONE is tpbench's own name for a job that Slurm does not know any more."""

DEFAULT_MAX_ARRAY_SIZE = 1001
"""Slurm's default of MaxArraySize."""

POLL_S = 0.5
"""Seconds between two queries of jobs that are about to end."""

ANSWER_S = 60.0
"""Longest wait for an answer of Slurm. A controller that is down keeps its clients waiting for minutes."""


class JobState(str):
    """Slurm's name of a job's state."""

    reason = ""
    """Slurm's reason why a pending job does not run."""

    @classmethod
    def read(cls, text: str) -> JobState:
        """Parse a state such as `PENDING|Resources` or `CANCELLED by 0`."""
        name, _, reason = text.partition("|")
        state = cls(name.partition(" ")[0])
        state.reason = reason if state == "PENDING" and reason != "None" else ""
        return state

    @property
    def text(self) -> str:
        """The state as text for the user."""
        return f"{self.lower()} ({self.reason})" if self.reason else self.lower()


UNKNOWN = JobState("UNKNOWN")
"""State of a job whose state cannot be queried now."""


def states(job_ids: Iterable[str]) -> dict[str, JobState]:
    """Return the state of each job from `squeue` or, for jobs that it no longer lists, from `sacct`.

    A job is missing in the result if its state cannot be queried now. It is GONE if neither command knows it. Raises
    JobError if Slurm is not installed.
    """
    if not (asked := set(job_ids)):
        return {}
    queued = _query(["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r"], asked)
    if queued is None:
        return {}
    known = {job_id: JobState.read(state) for job_id, state in queued.items() if job_id in asked}
    if missing := asked - known.keys():
        command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State"]
        accounted = _query(command, missing) or {}
        known |= {job_id: JobState.read(accounted.get(job_id, "GONE")) for job_id in missing}
    return known


def final_states(job_ids: Iterable[str]) -> dict[str, JobState]:
    """Return the states as soon as no job is COMPLETING: only then the final state of such a job is known."""
    asked = set(job_ids)
    while "COMPLETING" in (current := states(asked)).values():
        interrupts.sleep(POLL_S)
    return current


def max_array_length() -> int:
    """Return the most jobs that one array may have on this cluster."""
    answer = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True)
    matches = re.findall(r"^MaxArraySize\s*=\s*(\d+)|\bmax_array_tasks=(\d+)", answer.stdout, re.MULTILINE)
    limits = [int(number) for match in matches for number in match if number]
    # Array indices are below MaxArraySize. With MaxArraySize=0 there are no arrays, but single jobs.
    return max(1, min(limits, default=DEFAULT_MAX_ARRAY_SIZE))


def rejection_message(stderr: str) -> str:
    """Return one line for the user when Slurm rejects jobs, from the several lines of sbatch."""
    lines = [line.removeprefix("sbatch: error: ").strip() for line in stderr.splitlines()]
    message = f"Slurm rejects the jobs: {'; '.join(dict.fromkeys(filter(None, lines)))}"
    if not re.search("SubmitJob|job submit limit", stderr):
        return message
    return (
        f"{message} (the sweep may exceed MaxSubmitJobs or a similar limit; none of its jobs stays in the queue: run "
        "fewer cells at a time, with resume=true)"
    )


def address(node: str) -> str:
    """Return the address of a node in Slurm's configuration, which may differ from the node's name."""
    answer = subprocess.run(["scontrol", "show", "node", "--oneliner", node], capture_output=True, text=True)
    match = re.search(r"\bNodeAddr=(\S+)", answer.stdout)
    return match[1] if match else node


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel running and pending jobs."""
    if job_ids:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["scancel", *job_ids], capture_output=True, timeout=ANSWER_S)


def cancel_and_wait(job_ids: Iterable[str]) -> None:
    """Cancel the jobs that have not ended, and wait until all have. After that no job writes a row."""
    asked = set(job_ids)
    while left := sorted(asked - {job_id for job_id, state in states(asked).items() if state in ENDED}):
        cancel(left)
        interrupts.sleep(POLL_S)


def _query(command: list[str], job_ids: Iterable[str]) -> dict[str, str] | None:
    """Return the state text of each job by its number, or None if Slurm does not answer."""
    arrays = sorted({each.partition("_")[0] for each in job_ids})
    try:
        line = [*command, f"--jobs={','.join(arrays)}"]
        answer = subprocess.run(line, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return None
    except FileNotFoundError:
        raise JobError(f"this needs Slurm's commands: there is no {command[0]} here") from None
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    pairs = (line.partition("|") for line in answer.stdout.splitlines())
    return {job_id: state for job_id, _, state in pairs}
