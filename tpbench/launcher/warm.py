"""A torchrun that stays: its ranks have imported torch, and run one job after the other, each in a process forked for
it. Nothing that a job does to its process reaches the next: not its memory, seeds, limits or compiled functions."""

from __future__ import annotations

import time
from pathlib import Path

from tpbench.launcher import torchrun
from tpbench.launcher.attempt import Attempt, Outcome
from tpbench.launcher.devices import Lease
from tpbench.launcher.process import ProcessTree
from tpbench.serve import Spool


class WarmGroup:
    """Ranks that wait for jobs of one world size and environment."""

    def __init__(self, attempt: Attempt, env: dict[str, str], lease: Lease, folder: Path) -> None:
        folder.mkdir()
        self.spool = Spool(folder)
        self.jobs = 0
        line = torchrun.command(attempt.cell.job, folder / "group", folder, serve=True)
        self.command = " ".join(line)
        self.log = folder / "torchrun.log"
        # Not the locks of the devices: they are each job's, and while the group waits it has nothing on a GPU.
        marked = {**env, torchrun.MARKER: f"{attempt.row.row_id}.warm"}
        self.tree = ProcessTree(line, marked, self.log, cores=lease.cores)

    @property
    def alive(self) -> bool:
        return self.tree.agent.poll() is None

    def submit(self, attempt: Attempt) -> WarmJob:
        """Hand it the next job."""
        attempt.row.known.update(command=self.command, warm=self.jobs > 0)
        attempt.row.save(attempt.cell_file)
        attempt.agent_log.symlink_to(self.log)
        self.spool.put(self.jobs, attempt.cell_file)
        self.jobs += 1
        return WarmJob(attempt, self, self.jobs - 1)


class WarmJob:
    """A job in the hands of a group. A fault of any kind ends the group too."""

    def __init__(self, attempt: Attempt, group: WarmGroup, number: int) -> None:
        self.attempt, self.group, self.number = attempt, group, number
        self.deadline = time.monotonic() + attempt.cell.job.timeout_s

    def poll(self) -> Outcome | None:
        """Its outcome once it has one; by then none of its processes is left."""
        if self.group.spool.done(self.number, self.attempt.cell.job.world_size):
            return self.attempt.ended(0)
        code = self.group.tree.agent.poll()
        if code is None and time.monotonic() < self.deadline:
            return None
        if code is None:
            outcome = self.attempt.ended(None)
            self.end()
            return outcome
        self.end()
        return self.attempt.ended(code)

    def end(self) -> None:
        """End it and its group."""
        self.group.tree.end()
