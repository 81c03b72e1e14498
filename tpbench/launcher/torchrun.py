"""How a job becomes a torchrun command and its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpbench.job import Job

PACKAGE_ROOT = Path(__file__).resolve().parents[2]

INSTALLED = PACKAGE_ROOT.name in ("site-packages", "dist-packages")
"""Whether a job's Python finds this package by itself. To put such a folder first on its path would let all that lies
there hide the standard library and what the person put on the path."""

MARKER = "TPBENCH_ROW_ID"
"""Set in the environment of every process of a job, so that strays can be found whoever their parent is."""

LAUNCHER = "TPBENCH_LAUNCHER"
"""Likewise: which process started the job, so that it is known for a stray when that one is dead."""

OUTPUT_DIR = "TPBENCH_OUTPUT_DIR"
"""Likewise: where its row goes, for a sweep ends strays only where it resumes."""


NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Of NVLink, for all jobs on GPUs. `tpbench.kernels.symmetric` says why; alone it would come too late for communicators
that NCCL has made by then, and only to jobs with symmetric memory."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of a job meet."""

    nodes: int
    endpoint: str
    """Address and port of the store, which lives on the first node."""
    local_addr: str
    """This node's address, by which the others reach it."""
    hosts_store: bool = True
    """Whether this is the node with the store."""


LOOPBACK = Rendezvous(1, "127.0.0.1:0", "127.0.0.1")
"""Of a job on one node. Port 0 lets the operating system choose a free one when the store binds it, so that no two
sweeps can meet."""


def command(
    job: Job, cell_file: Path, log_dir: Path, rendezvous: Rendezvous = LOOPBACK, serve: bool = False
) -> list[str]:
    """The torchrun line of a job on this host. Redirected output gives each rank files of its own.

    `serve`: for ranks that wait for jobs, which come to the folder of the cell file.
    """
    several = [f"--rdzv-conf=is_host={str(rendezvous.hosts_store).lower()}"] if rendezvous.nodes > 1 else []
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={rendezvous.nodes}",
        f"--nproc-per-node={job.world_size // rendezvous.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous.endpoint}",
        f"--rdzv-id={_meeting(cell_file, rendezvous)}",
        *several,
        f"--local-addr={rendezvous.local_addr}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--log-dir={log_dir}",
        "--redirects=3",
        "-m",
        *(("tpbench.worker.server", str(cell_file.parent)) if serve else ("tpbench.worker.rank", str(cell_file))),
    ]


def _meeting(cell_file: Path, rendezvous: Rendezvous) -> str:
    """The same name on every node, and for no other job."""
    cell = cell_file.parent if rendezvous.nodes == 1 else cell_file.parent.parent
    return f"{cell.parent.name}-{cell.name}"


def environment(
    job: Job, row_id: str, inherited: Mapping[str, str] = os.environ, nodes: int = 1, cores: int = 0
) -> dict[str, str]:
    """The inherited environment with what a job needs; a variable that the person set is left as it is.

    `cores`: how many of this host's the job has; 0: all that this process has.
    """
    env = dict(inherited)
    env[MARKER] = row_id
    env[OUTPUT_DIR] = os.path.realpath(job.output_dir)
    if not INSTALLED:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), env.get("PYTHONPATH")]))
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interfaces = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback} if nodes == 1 else {}
    defaults = {
        **interfaces,
        "PYTHONUNBUFFERED": "1",
        # torchrun would say 1 for every rank; on a CPU the ranks share the cores.
        "OMP_NUM_THREADS": str(max(1, (cores or _cores()) * nodes // job.world_size)),
    }
    if job.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        if job.uses_triton:
            env["TRITON_INTERPRET"] = "1"
    else:
        env.pop("TRITON_INTERPRET", None)
        defaults |= NO_MULTICAST
    return {**defaults, **env}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
