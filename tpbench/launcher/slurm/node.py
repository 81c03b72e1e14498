"""The work of a Slurm job on each of its nodes: it runs one torchrun and stores the row."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from submitit import JobEnvironment
from submitit.core.utils import DelayedSubmission, UncompletedJobError

from tpbench.launcher.attempt import Attempt
from tpbench.launcher.devices import Lease
from tpbench.launcher.failure import is_consequence
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.submitted import record
from tpbench.launcher.torchrun import LOOPBACK, Rendezvous, Torchrun
from tpbench.measure import machine
from tpbench.worker.start import MARKER, SECRET, load_secret

KILL_S = 600.0
"""Time that a job which Slurm has told to end waits to be killed."""

PEER_ROW_S = 15.0
"""Time that a node which only lost its peers waits for the row of the node that knows the reason."""


@dataclass(frozen=True)
class NodeTask:
    """The function that submitit pickles and calls on each node. So its class must be importable there."""

    folder: str
    """The cell's folder, on the shared file system."""

    def __call__(self) -> None:
        here = JobEnvironment()
        folder = Path(self.folder)
        attempt = Attempt.load(folder)
        if attempt.has_row or attempt.abandoned or not record(folder, here.job_id):
            return  # requeued after the row was stored, or abandoned, perhaps by a sweep that did not know of this job
        if attempt.has_result:  # requeued after the measurement
            attempt.close()
            return
        if here.node == 0:
            attempt.reserve_result()  # a rank of the first run may have used the space
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        own = folder / (f"node{here.node}" if restarts == "0" else f"node{here.node}.{restarts}")
        own.mkdir(exist_ok=True)
        hosts = list(here.hostnames)
        facts = {**machine.facts(), "kernels_version": attempt.cell.job.kernels_version}
        task = attempt.task.restarted(**{**facts, "host": hosts[0], "nodes": len(hosts)})
        try:
            _run(replace(attempt, task=task, folder=own), _rendezvous(here.raw_job_id, here.node, hosts))
        except UncompletedJobError as error:  # submitit's, when there are no more requeues
            attempt.close("timeout", f"Slurm's time limit: {error}")
            raise

    def checkpoint(self) -> DelayedSubmission:
        """Return what runs when the job is requeued: the same again."""
        return DelayedSubmission(self)


def _rendezvous(job_id: str, node: int, hosts: list[str]) -> Rendezvous:
    if len(hosts) == 1:
        return LOOPBACK
    # Below the range of ports that systems use for outgoing connections.
    endpoint = f"{cluster.address(hosts[0])}:{10_000 + int(job_id) % 20_000}"
    own = reachable_address(cluster.address(hosts[node]), cluster.address(hosts[0 if node else 1]))
    return Rendezvous(len(hosts), endpoint, own, node)


def _run(attempt: Attempt, rendezvous: Rendezvous) -> None:
    # The folder's name is part of the marker, because two nodes may be on one host.
    variables = {MARKER: f"{attempt.task.row_id}.{attempt.folder.name}"}
    if rendezvous.nodes > 1:
        variables |= {SECRET: load_secret(attempt.task.folder), **gloo_interface(rendezvous.local_addr)}
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    torchrun = Torchrun([attempt], Lease(environment=variables), rendezvous=rendezvous)
    try:
        while (end := torchrun.find_end()) is None:
            time.sleep(0.05)
    finally:
        torchrun.end()
    _, status, _ = end
    if status != "timeout" and torchrun.tree.agent.returncode:
        _wait_to_be_killed(signals)
    deadline = time.monotonic() + PEER_ROW_S
    while (
        rendezvous.nodes > 1
        and not (attempt.has_row or attempt.has_result)
        and is_consequence(attempt.agent_log)
        and time.monotonic() < deadline
    ):
        time.sleep(0.2)
    if not attempt.abandoned:  # the row of an abandoned attempt was deleted, and must not come back
        torchrun.close(*end)


def _wait_to_be_killed(signals: list[int]) -> None:
    """Wait for Slurm's SIGKILL if SIGTERM has come, and store no row.

    Slurm sends SIGTERM to every process of a job that it cancels or preempts, torchrun included, and SIGKILL later. A
    preempted job runs again, so it must not have an `error` row by then. The job must not end by itself either: Slurm
    could take that for its regular end. The launcher or collect learns the reason from Slurm.
    """
    time.sleep(0.5)  # torchrun may have received the signal first
    if signals:
        time.sleep(KILL_S)
        raise RuntimeError("SIGTERM ended torchrun")


def reachable_address(own: str, peer: str) -> str:
    """Return the IP address at which this node's peers reach it.

    `own`: name or address of this node in Slurm's configuration, which this node may resolve to a loopback address.
    `peer`: name or address of another node.
    """
    _, address = _resolve(own)
    family, of_peer = _resolve(peer)
    if not ipaddress.ip_address(address).is_loopback:
        return address
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((of_peer, 9))  # sends nothing; the kernel chooses the interface
        return str(probe.getsockname()[0])


def gloo_interface(address: str) -> dict[str, str]:
    """Return the variable that makes gloo use the interface with this IP address.

    The result is empty if no interface has the address, or if the user has chosen an interface.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return family, str(address[0])
