"""A job with its own torchrun."""

from __future__ import annotations

import time

from tpbench.launcher import torchrun
from tpbench.launcher.cells.attempt import Attempt
from tpbench.launcher.cells.outcome import Outcome
from tpbench.launcher.devices.leases import Lease
from tpbench.launcher.process import ProcessTree


def outcome_of(attempt: Attempt, tree: ProcessTree, deadline: float) -> Outcome | None:
    """Return the outcome of an attempt whose torchrun has ended or exceeds the deadline, else None.

    With the outcome all processes of the torchrun have ended.
    """
    code = tree.agent.poll()
    if code is None and time.monotonic() < deadline:
        return None
    if code is None:
        # Read the logs before the end: a rank that receives SIGTERM adds lines that do not show why it hung.
        outcome = attempt.ended(None)
        tree.end()
        return outcome
    tree.end()
    return attempt.ended(code)


class ColdJob:
    """A job with its own torchrun. The constructor starts it."""

    def __init__(self, attempt: Attempt, lease: Lease) -> None:
        job = attempt.cell.job
        line = torchrun.command(job, attempt.task_file, attempt.folder)
        self.attempt = attempt.with_columns(command=" ".join(line))
        self.attempt.task.save(attempt.task_file)
        env = torchrun.environment(job, attempt.task.row_id, cores=len(lease.cores)) | dict(lease.environment)
        self.tree = ProcessTree(line, env, attempt.agent_log, lease.locks, lease.cores)
        self.deadline = time.monotonic() + job.timeout_s

    def poll(self) -> Outcome | None:
        """Return the outcome, or None while the job runs. With the outcome all its processes have ended."""
        return outcome_of(self.attempt, self.tree, self.deadline)

    def end(self) -> None:
        """End the job at once."""
        self.tree.end()
