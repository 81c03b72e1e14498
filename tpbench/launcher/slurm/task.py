"""What a Slurm job does on each of its nodes: one torchrun, and the row of a job that left none."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from submitit import JobEnvironment
from submitit.core.utils import DelayedSubmission, UncompletedJobError

from tpbench.launcher import failure, torchrun
from tpbench.launcher.attempt import GIVEN_UP, Attempt
from tpbench.launcher.process import ProcessTree
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.submitted import record
from tpbench.measure import machine

KILL_S = 600.0
"""How long a job that Slurm has told to end waits for its end."""

OTHERS_SPEAK_S = 15.0
"""How long a node that only lost its peers waits for the one that knows why to write the row."""


@dataclass(frozen=True)
class Task:
    """Travels to the nodes by pickle; so its class must be importable there, and what it holds plain."""

    folder: str
    """The cell's, on the shared file system."""

    def __call__(self) -> None:
        here = JobEnvironment()
        folder = Path(self.folder)
        attempt = Attempt.load(folder)
        if attempt.has_row or attempt.given_up or not record(folder, here.job_id):
            return  # requeued after all was done, or given up, perhaps by a sweep that did not know of this job
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        own = folder / (f"node{here.node}" if restarts == "0" else f"node{here.node}.{restarts}")
        own.mkdir(exist_ok=True)
        hosts = list(here.hostnames)
        row = attempt.row.restarted(**{**machine.facts(), "host": hosts[0], "nodes": len(hosts)})
        try:
            _run(Attempt(attempt.cell, row, own), _rendezvous(here.raw_job_id, here.node, hosts))
        except UncompletedJobError as error:  # submitit's, when there are no more requeues
            attempt.close("timeout", f"Slurm's time limit: {error}")
            raise

    def checkpoint(self) -> DelayedSubmission:
        """What runs when the job is requeued: the same again."""
        return DelayedSubmission(self)


def _rendezvous(job_id: str, node: int, hosts: list[str]) -> torchrun.Rendezvous:
    if len(hosts) == 1:
        return torchrun.LOOPBACK
    # Below the ports that systems give to outgoing connections.
    endpoint = f"{cluster.address(hosts[0])}:{10_000 + int(job_id) % 20_000}"
    return torchrun.Rendezvous(len(hosts), endpoint, cluster.address(hosts[node]), hosts_store=node == 0)


def _run(attempt: Attempt, rendezvous: torchrun.Rendezvous) -> None:
    job = attempt.cell.job
    line = torchrun.command(job, attempt.cell_file, attempt.folder, rendezvous)
    attempt.row.known["command"] = " ".join(line)
    attempt.row.save(attempt.cell_file)
    # Marked with its folder too: two nodes may be one host.
    marker = f"{attempt.row.row_id}.{attempt.folder.name}"
    env = torchrun.environment(job, marker, nodes=rendezvous.nodes)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    tree = ProcessTree(line, env, attempt.agent_log)
    try:
        code = tree.wait(job.timeout_s, lambda: None)
        if code is None:
            attempt.ended(None)
    finally:
        tree.end()
    if code:
        _wait_to_be_killed(told)
    deadline = time.monotonic() + OTHERS_SPEAK_S
    while rendezvous.nodes > 1 and not attempt.has_row and failure.is_consequence(attempt.agent_log):
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if not (attempt.folder.parent / GIVEN_UP).exists():  # its row is gone then, and must not come back
        attempt.ended(code)


def _wait_to_be_killed(told: list[int]) -> None:
    """Slurm tells every process of a job that it cancels or preempts to end, torchrun too, and kills after a while.

    Until then nobody here knows which it is: a preempted job will run again, and must not have a row that says `error`
    then. Nor may it end by itself, which Slurm might take for its regular end. Whoever collects will know.
    """
    time.sleep(0.5)  # torchrun may have heard of it first
    if told:
        time.sleep(KILL_S)
        raise RuntimeError("SIGTERM ended torchrun")
