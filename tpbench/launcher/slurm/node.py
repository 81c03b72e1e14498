"""The work of a Slurm job on each of its nodes: it runs cells one after the other, as on one host."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from submitit import JobEnvironment
from submitit.core.utils import DelayedSubmission, UncompletedJobError

from tpbench.launcher import interrupts
from tpbench.launcher.attempt import Attempt
from tpbench.launcher.display import Display
from tpbench.launcher.host import Host
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.submitted import record
from tpbench.launcher.torchrun import LOOPBACK, Rendezvous
from tpbench.worker.start import SECRET, load_secret

KILL_S = 600.0
"""Time that a job which Slurm has told to end waits to be killed."""


@dataclass(frozen=True)
class NodeTask:
    """The function that submitit pickles and calls on each node. So its class must be importable there."""

    folders: tuple[str, ...]
    """The folders of the cells, on the shared file system."""
    options: SweepOptions

    def __call__(self) -> None:
        here = JobEnvironment()
        hosts = list(here.hostnames)
        rendezvous = _rendezvous(int(here.raw_job_id), here.node, hosts)
        if len(hosts) > 1:
            secret, interface = load_secret(Path(self.folders[0])), gloo_interface(rendezvous(0).local_addr)
            os.environ.update({SECRET: secret, **interface})
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        logs = f"node{here.node}" if restarts == "0" else f"node{here.node}.{restarts}"
        options = replace(self.options, reuse=False, order="sequential") if len(hosts) > 1 else self.options
        host = Host(options, rendezvous)
        attempts = []
        for folder in map(Path, self.folders):
            attempt = Attempt.load(folder)
            if attempt.has_row or attempt.abandoned:
                continue  # requeued after the row was stored, or abandoned, perhaps by a sweep without this job
            if here.node == 0:  # the launcher may have died before it could
                record(attempt, here.job_id)
            if attempt.has_result:  # requeued after the measurement
                attempt.close()
                continue
            facts = {**host.facts, "kernels_version": attempt.cell.job.kernels_version}
            attempt = attempt.with_columns(**{**facts, "host": hosts[0], "nodes": len(hosts)})
            if options != self.options and self.options.order == "interleaved":
                attempt = attempt.with_columns(not_interleaved="its job has several nodes")
            attempts.append(replace(attempt, folder=folder / logs))
        try:
            with interrupts.noted(), Display(len(attempts), Path(self.folders[0]).parent) as display:
                for ended in host.run(attempts, display):
                    display.finish(ended)
        except interrupts.Terminated:
            # Slurm cancels or preempts the job, and sends SIGKILL later. A preempted job runs again: until then it must
            # not have an `error` row. It must not end by itself either: Slurm could take that for its regular end.
            time.sleep(KILL_S)
            raise RuntimeError("SIGTERM ended the job") from None
        except UncompletedJobError as error:  # submitit's, when there are no more requeues
            for attempt in attempts:
                if not attempt.has_row:
                    attempt.close("timeout", f"Slurm's time limit: {error}")
            raise

    def checkpoint(self) -> DelayedSubmission:
        """Return what runs when the job is requeued: the same again."""
        return DelayedSubmission(self)


def _rendezvous(job_id: int, node: int, hosts: list[str]) -> Callable[[int], Rendezvous]:
    """Return a function that returns the rendezvous of a cell, by the cell's index."""
    if len(hosts) == 1:
        return lambda cell: LOOPBACK
    first, local_addr = cluster.address(hosts[0]), address_towards(cluster.address(hosts[0 if node else 1]))

    def rendezvous(cell: int) -> Rendezvous:
        port = 10_000 + (job_id + 97 * cell) % 20_000  # below the ports that systems use for outgoing connections
        return Rendezvous(len(hosts), f"{first}:{port}", local_addr, node)

    return rendezvous


def address_towards(peer: str) -> str:
    """Return the IP address of this node on the way to another one, given by its name or address."""
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing; the kernel chooses the interface
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
