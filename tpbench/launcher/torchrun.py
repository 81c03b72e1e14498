"""The torchrun command and the environment of a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpbench.job import Job
from tpbench.launcher.devices.cores import available_cores
from tpbench.worker.start import MARKER

PACKAGE_ROOT = Path(__file__).resolve().parents[2]

INSTALLED = PACKAGE_ROOT.name in ("site-packages", "dist-packages")
"""True if Python finds this package without help. Such a folder must not be first on the path: its other packages could
hide the standard library, or what the user put on the path."""

LAUNCHER = "TPBENCH_LAUNCHER"
"""Environment variable of every process of a job: the launcher that started it, to tell whether that is dead."""

OUTPUT_DIR = "TPBENCH_OUTPUT_DIR"
"""Environment variable of every process of a job: its output folder. A sweep ends orphans of its own folder only."""


NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Variables that keep NVLink multicast off in all jobs on GPUs. `tpbench.kernels.symmetric` sets them too, but only in
jobs with symmetric memory, and after NCCL has made its first communicators."""


@dataclass(frozen=True)
class Rendezvous:
    """The address at which the nodes of a job meet."""

    nodes: int
    endpoint: str
    """Address and port of the store, which lives on the first node. Empty for one node, whose store is a file."""
    local_addr: str
    """The address of this node, as the other nodes reach it."""
    node: int = 0
    """Number of this node. Node 0 runs the store."""


LOOPBACK = Rendezvous(1, "", "127.0.0.1")
"""Rendezvous of a job on one node."""


def command(
    job: Job, task_file: Path, log_dir: Path, rendezvous: Rendezvous = LOOPBACK, serve: bool = False
) -> list[str]:
    """Return the torchrun line of a job on this host. Each rank writes its output to its own files.

    `serve`: start ranks that take tasks from a queue in the folder of `task_file`.
    """
    several = [f"--rdzv-endpoint={rendezvous.endpoint}", f"--rdzv-conf=rank={rendezvous.node}"]
    return [
        sys.executable,
        "-m",
        "tpbench.worker.torchrun",
        f"--nnodes={rendezvous.nodes}",
        f"--nproc-per-node={job.world_size // rendezvous.nodes}",
        "--rdzv-backend=tpbench",
        f"--rdzv-id={_job_name(task_file, rendezvous)}",
        *(several if rendezvous.nodes > 1 else []),
        f"--local-addr={rendezvous.local_addr}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--log-dir={log_dir}",
        "--redirects=3",
        "-m",
        *(("tpbench.worker.server", str(task_file.parent)) if serve else ("tpbench.worker.rank", str(task_file))),
    ]


def _job_name(task_file: Path, rendezvous: Rendezvous) -> str:
    """Return a name that is the same on every node and differs for every other job. It is no secret."""
    cell = task_file.parent if rendezvous.nodes == 1 else task_file.parent.parent
    return f"{cell.parent.name}-{cell.name}"


def environment(
    job: Job, row_id: str, inherited: Mapping[str, str] = os.environ, nodes: int = 1, cores: int = 0
) -> dict[str, str]:
    """Return the inherited environment with the variables of a job. A variable that the user has set stays as it is.

    Communication within one host always stays on the loopback interface, also where the user has set another one.
    `cores`: number of CPUs for the job on this host; 0: all that this process may use.
    """
    env = dict(inherited)
    env[MARKER] = row_id
    env[OUTPUT_DIR] = os.path.realpath(job.output_dir)
    if not INSTALLED:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), env.get("PYTHONPATH")]))
    if nodes == 1:
        env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    defaults = {
        "PYTHONUNBUFFERED": "1",
        # torchrun would set 1 for every rank; on a CPU the ranks share the cores.
        "OMP_NUM_THREADS": str(max(1, (cores or available_cores()) * nodes // job.world_size)),
    }
    if job.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        if job.uses_triton:
            env["TRITON_INTERPRET"] = "1"
    else:
        env.pop("TRITON_INTERPRET", None)
        defaults |= NO_MULTICAST
    return {**defaults, **env}
