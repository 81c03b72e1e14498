"""A torchrun that stays: its ranks have imported torch, and run one job after the other, each in a process forked for
it, or on GPUs in one that the last job has left clean. Nothing that a job does to its process reaches the next: not its
memory, seeds, limits or compiled functions."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from tpbench.job import Job
from tpbench.launcher import torchrun
from tpbench.launcher.attempt import Attempt, Outcome
from tpbench.launcher.device_choice import Device
from tpbench.launcher.devices import Lease
from tpbench.launcher.process import ProcessTree
from tpbench.worker.server import Order, Spool

REST_S = 30.0
"""How long ranks may take to let go of their devices."""
POLL_S = 0.01


def may_stay(job: Job) -> bool:
    """Whether its processes may have the next job too, if it leaves nothing in them. On a CPU none does: a fork is
    cheap there, and memory, its limits and its peaks are the process's."""
    return (
        job.device == "cuda"
        and job.memory_limit_gib is None
        and job.workload.forgets
        and set(job.implementation.needs) <= {"triton"}  # other packages keep what they like
    )


class WarmGroup:
    """Ranks that wait for jobs of one world size and environment."""

    def __init__(self, attempt: Attempt, env: dict[str, str], lease: Lease, folder: Path) -> None:
        folder.mkdir()
        self.spool = Spool(folder)
        self.ranks, self.devices = attempt.cell.job.world_size, lease.devices
        self.jobs = 0
        self.resident = False
        """Whether its processes may still hold what the last job had on the devices."""
        line = torchrun.command(attempt.cell.job, folder / "group", folder, serve=True)
        self.command = " ".join(line)
        self.log = folder / "torchrun.log"
        # Not the locks of the devices: they are each job's, and whoever else wants the devices has the group rest.
        marked = {**env, torchrun.MARKER: f"{attempt.row.row_id}.warm"}
        self.tree = ProcessTree(line, marked, self.log, cores=lease.cores)

    @property
    def alive(self) -> bool:
        return self.tree.agent.poll() is None

    def submit(self, attempt: Attempt) -> WarmJob:
        """Hand it the next job."""
        self.resident = may_stay(attempt.cell.job) and attempt.row.sharers == 1
        attempt.row.known.update(command=self.command, warm=self.jobs > 0)
        attempt.row.save(attempt.cell_file)
        attempt.agent_log.symlink_to(self.log)
        self.spool.put(self.jobs, Order(attempt.cell_file, self.resident))
        self.jobs += 1
        return WarmJob(attempt, self, self.jobs - 1)

    def rest(self, wanted: Collection[Device] | None = None) -> None:
        """Let go of the devices, if any are among the wanted: no job is at work here."""
        if not self.resident or (wanted is not None and not set(wanted) & set(self.devices)):
            return
        self.resident = False
        self.spool.put(self.jobs, None)
        until = time.monotonic() + REST_S
        while self.alive and not self.spool.done(self.jobs, self.ranks):
            if time.monotonic() > until:
                self.tree.end()
            time.sleep(POLL_S)
        self.jobs += 1


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
