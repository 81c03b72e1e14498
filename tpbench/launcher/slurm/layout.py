"""What is asked of Slurm: a partition that has room for the cells, and the nodes of each job.

Tensor-parallel ranks share a node; replicas may be on several.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tpbench.job import Job
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.cluster import SlurmSettings
from tpbench.measure import machine
from tpbench.settings import JobError
from tpbench.suggestions import unknown


@dataclass(frozen=True)
class Layout:
    """Nodes with the same number of ranks on each. Cells with the same layout share arrays."""

    nodes: int
    ranks_per_node: int
    device: str


def layout(job: Job, ranks_per_node: int) -> Layout:
    """Return the fewest nodes that hold the job, each with the same number of whole replicas."""
    fitting = ranks_per_node // job.tp_size
    replicas = max(count for count in range(1, max(fitting, 1) + 1) if job.dp_size % count == 0)
    return Layout(job.dp_size // replicas, replicas * job.tp_size, job.device)


@dataclass(frozen=True)
class Partition:
    """A planning target: a partition, described by its biggest node."""

    gpus_per_node: int
    cores_per_node: int
    nodes: int
    """Nodes of the partition, including nodes that are down. If the user chose none, of the largest partition."""

    @classmethod
    def find(cls, settings: SlurmSettings) -> Partition:
        """Return the partition from the settings and, for values that they leave open, from sinfo.

        Raises JobError if Slurm is not installed, does not answer, or has no nodes.
        """
        if shutil.which("sbatch") is None:
            raise JobError("hydra/launcher=torchrun_slurm needs Slurm's commands: there is no sbatch here")
        of_partition = [f"--partition={settings.partition}"] if settings.partition else []
        kinds = [line.split("|", 3) for line in _sinfo("--format=%P|%D|%c|%G", *of_partition)]
        if not kinds:
            raise JobError(unknown("partition with nodes", settings.partition, set(_sinfo("--format=%R"))))
        nodes: Counter[str] = Counter()
        for partition, number, _, _ in kinds:
            nodes[partition] += int(number)
        cores = max(int(re.sub(r"\D", "", each) or 1) for _, _, each, _ in kinds)
        gpus = max(sum(map(int, re.findall(r"gpu(?::[^:,(]+)?:(\d+)", each))) for _, _, _, each in kinds)
        if _torch_without_cuda():  # which cannot use the GPUs that sinfo reports
            gpus = 0
        return cls(settings.gpus_per_node or gpus, settings.gpus_per_node or cores, max(nodes.values()))

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """The device that device=auto means on this partition."""
        return "cpu" if _torch_without_cuda() or not self.gpus_per_node else "cuda"

    def max_ranks_per_node(self, job: Job) -> int:
        """Return the most ranks of the job that one node holds."""
        return self.gpus_per_node if job.device == "cuda" else self.cores_per_node

    def nodes_of(self, job: Job) -> int:
        """Return the number of nodes that the job takes."""
        return layout(job, self.max_ranks_per_node(job)).nodes

    def skip_reason(self, job: Job) -> str | None:
        """Return why the partition is too small for the job, or None if it is not."""
        if job.tp_size > (most := self.max_ranks_per_node(job)):
            unit = "GPUs" if job.device == "cuda" else "ranks"
            return f"needs {job.tp_size} {unit} of one node, a node has {most}"
        if (nodes := self.nodes_of(job)) > self.nodes:
            return f"needs {nodes} nodes, the partition has {self.nodes}"
        return None


def _sinfo(*options: str) -> list[str]:
    """Return the lines of sinfo. Raises JobError if no cluster answers."""
    answered = cluster.answer("sinfo", "--noheader", *options)
    if answered is None or answered.returncode:
        reason = f"sinfo says {' '.join(answered.stderr.split())[:200]}" if answered else "sinfo is silent"
        raise JobError(f"hydra/launcher=torchrun_slurm needs a Slurm cluster, and none answers: {reason}")
    return answered.stdout.splitlines()


def _torch_without_cuda() -> bool:
    return str(machine.version("torch")).endswith("+cpu")
