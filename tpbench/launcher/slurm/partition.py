"""The Slurm partition that cells are planned for."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tpbench.job import Job
from tpbench.launcher.slurm.layout import layout
from tpbench.launcher.slurm.settings import SlurmSettings
from tpbench.measure import machine
from tpbench.settings import JobError
from tpbench.suggestions import unknown


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

    def skip_reason(self, job: Job) -> str | None:
        """Return why the partition is too small for the job, or None if it is not."""
        if job.tp_size > (most := self.max_ranks_per_node(job)):
            unit = "GPUs" if job.device == "cuda" else "ranks"
            return f"needs {job.tp_size} {unit} of one node, a node has {most}"
        if (nodes := layout(job, most).nodes) > self.nodes:
            return f"needs {nodes} nodes, the partition has {self.nodes}"
        return None


def _sinfo(*options: str) -> list[str]:
    """Return the lines of sinfo. Raises JobError if no cluster answers."""
    answer = subprocess.run(["sinfo", "--noheader", *options], capture_output=True, text=True)
    if answer.returncode:
        reason = " ".join(answer.stderr.split())[:200]
        raise JobError(f"hydra/launcher=torchrun_slurm needs a Slurm cluster, and none answers: sinfo says {reason}")
    return answer.stdout.splitlines()


def _torch_without_cuda() -> bool:
    return str(machine.version("torch")).endswith("+cpu")
