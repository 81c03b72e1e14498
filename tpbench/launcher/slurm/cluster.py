"""What Slurm says: of its nodes, and of jobs."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tpbench.job import Job
from tpbench.launcher.slurm.layout import layout
from tpbench.launcher.slurm.settings import SlurmSettings
from tpbench.measure import machine
from tpbench.settings import JobError

ENDED = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
     "REVOKED", "GONE")
)  # fmt: skip
"""States from which a job does not come back. GONE is ours: Slurm does not know the job any more."""

DEFAULT_ARRAY = 1001
"""Slurm's own MaxArraySize, where a cluster does not tell its."""

POLL_S = 0.5
"""Seconds between two looks at jobs that are about to end."""


@dataclass(frozen=True)
class Cluster:
    """A partition, by its biggest node: the place that cells are planned for."""

    gpus_per_node: int
    cores_per_node: int
    nodes: int
    """In it, those too that are down now; without a partition of the person's choice, in the largest."""

    @classmethod
    def find(cls, settings: SlurmSettings) -> Cluster:
        """By the settings or, where they are silent, by sinfo. Raises JobError where there is no Slurm."""
        if shutil.which("sbatch") is None:
            raise JobError("hydra/launcher=torchrun_slurm needs Slurm's commands: there is no sbatch here")
        line = [
            "sinfo",
            "--noheader",
            "--format=%P|%D|%c|%G",
            *([f"--partition={settings.partition}"] * bool(settings.partition)),
        ]
        answer = subprocess.run(line, capture_output=True, text=True)
        if answer.returncode:
            raise JobError(f"sinfo failed: {answer.stderr.strip()}")
        kinds = [each.split("|", 3) for each in answer.stdout.splitlines()]
        if not kinds:
            raise JobError(f"Slurm has no nodes in partition={settings.partition}")
        nodes: Counter[str] = Counter()
        for partition, number, _, _ in kinds:
            nodes[partition] += int(number)
        cores = max(int(re.sub(r"\D", "", each) or 1) for _, _, each, _ in kinds)
        gpus = max(sum(map(int, re.findall(r"gpu(?::[^:,(]+)?:(\d+)", each))) for _, _, _, each in kinds)
        # What sinfo counts as a GPU is no use to a torch that was built without CUDA.
        usable = gpus if not str(machine.version("torch")).endswith("+cpu") else 0
        return cls(settings.gpus_per_node or usable, settings.gpus_per_node or cores, max(nodes.values()))

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """What device=auto means there."""
        without = str(machine.version("torch")).endswith("+cpu") or not self.gpus_per_node
        return "cpu" if without else "cuda"

    def ranks_per_node(self, job: Job) -> int:
        """The most ranks of the job on one node."""
        return self.gpus_per_node if job.device == "cuda" else self.cores_per_node

    def obstacle(self, job: Job) -> str | None:
        """Why the job cannot run there, or None."""
        if job.tp_size > (most := self.ranks_per_node(job)):
            what = "GPUs" if job.device == "cuda" else "ranks"
            return f"needs {job.tp_size} {what} of one node, a node has {most}"
        if (nodes := layout(job, most).nodes) > self.nodes:
            return f"needs {nodes} nodes, the partition has {self.nodes}"
        return None


class State(str):
    """What Slurm calls the state of a job."""

    reason = ""
    """Why a job that is pending does not run, in Slurm's words."""

    @classmethod
    def read(cls, text: str) -> State:
        """From `PENDING|Resources`, or `CANCELLED by 0`."""
        name, _, reason = text.partition("|")
        state = cls(name.partition(" ")[0])
        state.reason = reason if state == "PENDING" and reason != "None" else ""
        return state

    @property
    def words(self) -> str:
        """For a person."""
        return f"{self.lower()} ({self.reason})" if self.reason else self.lower()


UNKNOWN = State("UNKNOWN")
"""Of a job of which nobody can say anything now."""


def states(job_ids: Iterable[str]) -> dict[str, State]:
    """The state of each job as `squeue` has it or, once that has forgotten, `sacct`. Jobs of which nobody can say
    anything now are left out; those that nobody knows are GONE. Raises JobError where there is no Slurm."""
    if not (asked := set(job_ids)):
        return {}
    answers = _ask(["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r"], asked)
    if answers is None:
        return {}
    found = {job_id: State.read(state) for job_id, state in answers.items() if job_id in asked}
    if missing := asked - found.keys():
        accounted = _ask(["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State"], missing) or {}
        found |= {job_id: State.read(accounted.get(job_id, "GONE")) for job_id in missing}
    return found


def settled(job_ids: Iterable[str]) -> dict[str, State]:
    """Their states, once none of them is being ended: what becomes of such a one is not known before."""
    asked = set(job_ids)
    while "COMPLETING" in (found := states(asked)).values():
        time.sleep(POLL_S)
    return found


def longest_array() -> int:
    """How many jobs one array may have here."""
    answer = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True)
    found = re.findall(r"^MaxArraySize\s*=\s*(\d+)|\bmax_array_tasks=(\d+)", answer.stdout, re.MULTILINE)
    limits = [int(number) for each in found for number in each if number]
    # The indices are below MaxArraySize; with 0 there are no arrays, but there are jobs.
    return max(1, min(limits, default=DEFAULT_ARRAY))


def refused(said: str) -> str:
    """What a person is told when Slurm takes no jobs. `said`: by sbatch, over several lines."""
    words = [line.removeprefix("sbatch: error: ").strip() for line in said.splitlines()]
    message = f"Slurm does not take the jobs: {'; '.join(dict.fromkeys(filter(None, words)))}"
    if not re.search("SubmitJob|job submit limit", said):
        return message
    return (
        f"{message} (if it is their number, MaxSubmitJobs or a limit like it: none of them stays in the queue; run "
        "fewer cells at a time, with resume=true)"
    )


def address(node: str) -> str:
    """Where a node can be reached: Slurm's own address of it, which need not be its name."""
    answer = subprocess.run(["scontrol", "show", "node", "--oneliner", node], capture_output=True, text=True)
    found = re.search(r"\bNodeAddr=(\S+)", answer.stdout)
    return found[1] if found else node


def cancel(job_ids: Sequence[str]) -> None:
    """End the jobs, or take them out of the queue."""
    if job_ids:
        subprocess.run(["scancel", *job_ids], capture_output=True)


def end(job_ids: Iterable[str]) -> None:
    """End those that have not ended yet. When this returns none of them writes a row any more."""
    asked = set(job_ids)
    while left := sorted(asked - {job_id for job_id, state in states(asked).items() if state in ENDED}):
        cancel(left)
        time.sleep(POLL_S)


def _ask(command: list[str], job_ids: Iterable[str]) -> dict[str, str] | None:
    whole = sorted({each.partition("_")[0] for each in job_ids})
    try:
        answer = subprocess.run([*command, f"--jobs={','.join(whole)}"], capture_output=True, text=True)
    except FileNotFoundError:
        raise JobError(f"this needs Slurm's commands: there is no {command[0]} here") from None
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    pairs = (line.partition("|") for line in answer.stdout.splitlines())
    return {job_id: state for job_id, _, state in pairs}
