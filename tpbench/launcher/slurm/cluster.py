"""A Slurm cluster: its commands, and a partition with room for the cells.

Tensor-parallel ranks share a node; replicas may be on several.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE
from typing import Literal, NamedTuple, Self

from tpbench.job import Job
from tpbench.launcher import interrupts
from tpbench.launcher.display import QUIET_S
from tpbench.launcher.options import SlurmSettings
from tpbench.launcher.planning.plan import PlanningTarget
from tpbench.measure import machine
from tpbench.settings import JobError
from tpbench.suggestions import printable, unknown

ENDED = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
     "REVOKED", "GONE")
)  # fmt: skip
"""Final states of a job. GONE is tpbench's own name for a job that Slurm does not know any more."""

UNKNOWN = "UNKNOWN"  # the state of a job cannot be queried now

POLL_S = 0.5  # between two queries of jobs that are about to end

ANSWER_S = 60.0
"""Longest wait for an answer of Slurm. A controller that is down keeps its clients waiting for minutes."""

_CLIENT_VARIABLE = re.compile(
    r"(SBATCH|SQUEUE|SACCT|SINFO|SCANCEL|SCONTROL|SALLOC|SRUN)_|SLURM_(?!(CONF|CLUSTERS|JWT|SACK_\w+)$)"
)
"""With the variables of a job in which the sweep itself runs: they would hold for the jobs that it submits, too."""
_DEFAULTS_OF_USERS = {"SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_CONSTRAINT", "SBATCH_RESERVATION"}


def drop_client_variables(settings: SlurmSettings | None = None) -> None:
    """Delete variables that change what Slurm's commands do or answer. A user's defaults of null settings stay."""
    for name in filter(_CLIENT_VARIABLE.match, list(os.environ)):
        if name not in _DEFAULTS_OF_USERS or getattr(settings, name.removeprefix("SBATCH_").lower(), None):
            del os.environ[name]


def states(job_ids: Iterable[str]) -> dict[str, str]:
    """Return the state of each job, as `PENDING (Resources)`, or nothing if Slurm does not answer now."""
    if not (asked := set(job_ids)):
        return {}
    answers = _query(["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T (%r)"], asked)
    if answers is None:
        return {}
    if missing := asked - answers.keys():
        command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State"]
        answers |= dict.fromkeys(missing, "GONE") | (_query(command, missing) or {})
    pending = {job_id for job_id in asked if answers[job_id].startswith("PENDING")}
    # Without the reason of other states, and the user in `CANCELLED by 0`.
    return {job_id: answers[job_id] if job_id in pending else answers[job_id].partition(" ")[0] for job_id in asked}


def answer(*command: str) -> subprocess.CompletedProcess[str]:
    """Return what one of Slurm's commands answers; one that is silent for long has failed. Raises JobError.

    A line says that it waits, because a plan asks Slurm before the progress of the sweep is shown.
    """
    try:
        process = subprocess.Popen(command, text=True, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    except FileNotFoundError:
        raise JobError(f"this needs Slurm's commands: there is no {command[0]} here") from None
    began = printed = time.monotonic()
    try:
        while (now := time.monotonic()) < began + ANSWER_S:
            interrupts.check()
            if now > printed + QUIET_S:
                printed = now
                print(f"{command[0]} of Slurm has not answered for {now - began:.0f} s", file=sys.stderr, flush=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, errors = process.communicate(timeout=0.2)
                return subprocess.CompletedProcess(command, process.returncode, output, errors)
    finally:
        process.kill()
    return subprocess.CompletedProcess(command, 1, "", f"nothing in {ANSWER_S:.0f} s")


def rejection_message(stderr: str) -> str:
    """Return one line for the user when Slurm rejects jobs, from the several lines of sbatch."""
    lines = (line.removeprefix("sbatch: error: ").strip() for line in stderr.splitlines())
    return f"Slurm rejects the jobs, so none is in the queue: {'; '.join(dict.fromkeys(filter(None, lines)))}"


def address(node: str) -> str:
    """Return the address of a node in Slurm's configuration, which may differ from the node's name."""
    match = re.search(r"\bNodeAddr=(\S+)", answer("scontrol", "show", "node", node).stdout)
    return match[1] if match else node


def cancel_and_wait(job_ids: set[str]) -> None:
    """Cancel the jobs that have not ended, and wait until all have. After that no job writes a row."""
    while live := sorted(job_ids - {job_id for job_id, state in states(job_ids).items() if state in ENDED}):
        answer("scancel", *live)
        interrupts.sleep(POLL_S)


def _query(command: list[str], job_ids: Iterable[str]) -> dict[str, str] | None:
    """Return the state text of each job by its number, or None if Slurm does not answer."""
    arrays = sorted({job_id.partition("_")[0] for job_id in job_ids})
    answered = answer(*command, f"--jobs={','.join(arrays)}")
    if answered.returncode and "Invalid job id" not in answered.stderr:
        return None
    pairs = (line.partition("|") for line in answered.stdout.splitlines())
    return {job_id: state for job_id, _, state in pairs}


class Layout(NamedTuple):
    """Nodes with equally many ranks. Cells with the same layout share arrays."""

    nodes: int
    ranks_per_node: int
    device: str


@dataclass(frozen=True)
class Partition(PlanningTarget):
    """A partition, described by its biggest node."""

    gpus_per_node: int
    cores_per_node: int
    nodes: int
    """Number of nodes, with those that are down. Without a chosen partition: of the largest one."""

    @classmethod
    def find(cls, settings: SlurmSettings) -> Self:
        """Return the partition from the settings and from sinfo. Raises JobError if no nodes are found."""
        of_partition = [f"--partition={settings.partition}"] if settings.partition else []
        kinds = [line.split("|", 3) for line in _sinfo("--format=%P|%D|%c|%G", *of_partition)]
        if not kinds:
            raise JobError(unknown("partition with nodes", settings.partition, set(_sinfo("--format=%R"))))
        nodes: Counter[str] = Counter()
        for partition, number, _, _ in kinds:
            nodes[partition] += int(number)
        cores = max(int(re.sub(r"\D", "", cores) or 1) for _, _, cores, _ in kinds)
        if (asked := settings.cpus_per_task or 0) > cores and not any("+" in kind[2] for kind in kinds):
            raise JobError(
                f"cpus_per_task={asked}: the largest node has {cores} CPUs, so Slurm would never start the job"
            )
        gpus = max(sum(map(int, re.findall(r"gpu(?::[^:,(]+)?:(\d+)", gpus))) for _, _, _, gpus in kinds)
        if str(machine.version("torch")).endswith("+cpu"):  # it cannot use the GPUs that sinfo reports
            gpus = 0
        return cls(settings.gpus_per_node or gpus, settings.gpus_per_node or cores, max(nodes.values()))

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        return "cuda" if self.gpus_per_node else "cpu"

    def max_ranks_per_node(self, job: Job) -> int:
        return self.gpus_per_node if job.device == "cuda" else self.cores_per_node

    def layout(self, job: Job) -> Layout:
        """Return the fewest nodes that hold the job, each with the same number of whole replicas."""
        fitting = self.max_ranks_per_node(job) // job.tp_size
        replicas = max(count for count in range(1, max(fitting, 1) + 1) if job.dp_size % count == 0)
        return Layout(job.dp_size // replicas, replicas * job.tp_size, job.device)

    def nodes_of(self, job: Job) -> int:
        return self.layout(job).nodes

    def skip_reason(self, job: Job) -> str | None:
        if job.tp_size > (most := self.max_ranks_per_node(job)):
            unit = "GPUs" if job.device == "cuda" else "ranks"
            return f"needs {job.tp_size} {unit} of one node, a node has {most}"
        if (nodes := self.nodes_of(job)) > self.nodes:
            return f"needs {nodes} nodes, the partition has {self.nodes}"
        return None


def _sinfo(*options: str) -> list[str]:
    """Return the lines of sinfo. Raises JobError if no cluster answers."""
    answered = answer("sinfo", "--noheader", *options)
    if answered.returncode:
        error = printable((answered.stderr.strip().splitlines() or ["nothing"])[-1])
        what = "hydra/launcher=torchrun_slurm needs a Slurm cluster, and none answers"
        raise JobError(f"{what}: sinfo says {error}; use a login node of the cluster")
    return answered.stdout.splitlines()
