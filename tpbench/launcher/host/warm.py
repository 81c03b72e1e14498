"""A torchrun that stays for many jobs (`reuse=true`): its ranks have imported torch and take tasks from a queue.

Each job runs in a process forked for it or, on GPUs, in a process that the last job left without observable state. So
nothing that a job does to its process reaches the next job: not its memory, seeds, limits or compiled functions.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from tpbench.job import Job
from tpbench.launcher import torchrun
from tpbench.launcher.cells.attempt import Attempt
from tpbench.launcher.cells.outcome import Outcome
from tpbench.launcher.devices.choice import Device
from tpbench.launcher.devices.leases import Lease
from tpbench.launcher.host.cold import outcome_of
from tpbench.launcher.process import ProcessTree
from tpbench.worker.queue import QueuedTask, TaskQueue
from tpbench.worker.start import MARKER

RELEASE_S = 30.0
"""Time that ranks have to release their devices."""
POLL_S = 0.01


def reusable(job: Job) -> bool:
    """Return True if the job's processes may run the next job too, provided that they leave no observable state.

    On a CPU no process is reused: a fork is cheap there, and memory, its limits and its peak belong to the process.
    """
    return (
        job.device == "cuda"
        and job.memory_limit_gib is None
        and job.workload.reusable_process
        and job.outside is None  # such code may keep any state, too
        and set(job.implementation.requires) <= {"triton"}  # other packages may keep any state
    )


class ReusedTorchrun:
    """A torchrun whose ranks, of one world size and environment, wait for jobs."""

    def __init__(self, attempt: Attempt, env: dict[str, str], lease: Lease, folder: Path) -> None:
        folder.mkdir()
        self.queue = TaskQueue(folder)
        self.ranks, self.devices = attempt.cell.job.world_size, lease.devices
        self.jobs = 0
        self.holds_devices = False
        """True if its processes may still hold memory of the devices from the last job."""
        line = torchrun.command(attempt.cell.job, folder / "group", folder, serve=True)
        self.command = " ".join(line)
        self.log = folder / "torchrun.log"
        # The locks of the devices belong to each job, not to the torchrun: others who want the devices call `release`.
        marked = {**env, MARKER: f"{attempt.task.row_id}.warm"}
        self.tree = ProcessTree(line, marked, self.log, cores=lease.cores)

    @property
    def alive(self) -> bool:
        return self.tree.agent.poll() is None

    def submit(self, attempt: Attempt) -> WarmJob:
        """Start the next job."""
        self.holds_devices = reusable(attempt.cell.job) and attempt.task.sharing_cells == 1
        attempt = attempt.with_columns(command=self.command, warm=self.jobs > 0)
        attempt.task.save(attempt.task_file)
        attempt.agent_log.symlink_to(self.log)
        self.queue.put(self.jobs, QueuedTask(attempt.task_file, self.holds_devices))
        self.jobs += 1
        return WarmJob(attempt, self, self.jobs - 1)

    def release(self, wanted: Collection[Device] | None = None) -> None:
        """Release the devices, if any of them is wanted (None: all are). No job may be running in it."""
        if not self.holds_devices or (wanted is not None and not set(wanted) & set(self.devices)):
            return
        self.holds_devices = False
        self.queue.put(self.jobs, None)
        deadline = time.monotonic() + RELEASE_S
        while self.alive and not self.queue.done(self.jobs, self.ranks):
            if time.monotonic() > deadline:
                self.tree.end()
            time.sleep(POLL_S)
        self.jobs += 1


class WarmJob:
    """A job that runs in a reused torchrun. If it fails, its torchrun ends too."""

    def __init__(self, attempt: Attempt, reused: ReusedTorchrun, number: int) -> None:
        self.attempt, self.torchrun, self.number = attempt, reused, number
        self.deadline = time.monotonic() + attempt.cell.job.timeout_s

    def poll(self) -> Outcome | None:
        """Return the outcome, or None while the job runs. With the outcome its processes have ended or are idle."""
        if self.torchrun.queue.done(self.number, self.attempt.cell.job.world_size):
            return self.attempt.ended(0)
        return outcome_of(self.attempt, self.torchrun.tree, self.deadline)

    def end(self) -> None:
        """End the job and its torchrun at once."""
        self.torchrun.tree.end()
