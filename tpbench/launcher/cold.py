"""A job with its own torchrun."""

from __future__ import annotations

import time

from tpbench.launcher import torchrun
from tpbench.launcher.attempt import Attempt, Outcome
from tpbench.launcher.devices import Lease
from tpbench.launcher.process import ProcessTree


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
        code = self.tree.agent.poll()
        if code is None and time.monotonic() < self.deadline:
            return None
        if code is None:
            # Read the logs before the end: a rank that receives SIGTERM adds lines that do not show why it hung.
            outcome = self.attempt.ended(None)
            self.tree.end()
            return outcome
        self.tree.end()
        return self.attempt.ended(code)

    def end(self) -> None:
        """End the job at once."""
        self.tree.end()
