"""How a job becomes a torchrun command and its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tpbench.job import Job

PACKAGE_ROOT = Path(__file__).resolve().parents[2]

MARKER = "TPBENCH_ROW_ID"
"""Set in the environment of every process of a job, so that strays can be found whoever their parent is."""


def command(job: Job, cell_file: Path, log_dir: Path) -> list[str]:
    """The torchrun line of a job on this host.

    Port 0 lets the operating system choose a free one when the rendezvous store binds it, so that no two sweeps can
    meet; redirected output gives each rank files of its own.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={job.world_size}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={cell_file.parent.parent.name}-{cell_file.parent.name}",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--log-dir={log_dir}",
        "--redirects=3",
        "-m",
        "tpbench.worker",
        str(cell_file),
    ]


def environment(job: Job, row_id: str, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The inherited environment with what a job needs; a variable that the person set is left as it is."""
    env = dict(inherited)
    env[MARKER] = row_id
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), env.get("PYTHONPATH")]))
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    defaults = {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "PYTHONUNBUFFERED": "1",
        # torchrun would say 1 for every rank; on a CPU the ranks share the cores.
        "OMP_NUM_THREADS": str(max(1, _cores() // job.world_size)),
    }
    if job.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        if job.implementation.uses_triton:
            env["TRITON_INTERPRET"] = "1"
    else:
        env.pop("TRITON_INTERPRET", None)
    return {**defaults, **env}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
