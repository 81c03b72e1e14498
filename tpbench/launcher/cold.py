"""A job with a torchrun of its own."""

from __future__ import annotations

import time

from tpbench.launcher import torchrun
from tpbench.launcher.attempt import Attempt, Outcome
from tpbench.launcher.devices import Lease
from tpbench.launcher.process import ProcessTree


class ColdJob:
    """Started when it is made."""

    def __init__(self, attempt: Attempt, lease: Lease) -> None:
        self.attempt = attempt
        job = attempt.cell.job
        line = torchrun.command(job, attempt.cell_file, attempt.folder)
        attempt.row.known["command"] = " ".join(line)
        attempt.row.save(attempt.cell_file)
        env = torchrun.environment(job, attempt.row.row_id, cores=len(lease.cores)) | dict(lease.environment)
        self.tree = ProcessTree(line, env, attempt.agent_log, lease.locks, lease.cores)
        self.deadline = time.monotonic() + job.timeout_s

    def poll(self) -> Outcome | None:
        """Its outcome once it has one; by then nothing of it is left."""
        code = self.tree.agent.poll()
        if code is None and time.monotonic() < self.deadline:
            return None
        if code is None:
            # Read before the end: a rank that is told to stop adds lines that say nothing of why it hung.
            outcome = self.attempt.ended(None)
            self.tree.end()
            return outcome
        self.tree.end()
        return self.attempt.ended(code)

    def end(self) -> None:
        """End it, whatever it is doing."""
        self.tree.end()
