"""The machine that a sweep is planned for, and why a job cannot run there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from tpbench import packages
from tpbench.job import Job, unsupported_reason


class PlanningTarget(Protocol):
    """A host or a cluster that cells are planned for."""

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """The device that device=auto means on this target."""

    def skip_reason(self, job: Job) -> str | None:
        """Return why the target has too few GPUs or nodes for the job, or None if it has enough."""


@dataclass(frozen=True)
class ThisHost:
    """The host that this process runs on."""

    gpus: int

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        return "cuda" if self.gpus else "cpu"

    def skip_reason(self, job: Job) -> str | None:
        if job.device == "cuda" and job.world_size > self.gpus:
            return f"needs {job.world_size} GPUs, found {self.gpus}"
        return None


def skip_reason(job: Job, target: PlanningTarget) -> str | None:
    """Return why the job cannot run on the target, or None if it can.

    Reasons are an unsupported combination, a missing package, and too few GPUs or nodes.
    """
    if reason := unsupported_reason(job):
        return reason
    if missing := [each for each in job.implementation.requires if not packages.installed(each)]:
        return packages.not_installed(missing)
    if reason := target.skip_reason(job):
        return reason
    if job.device == "cuda" and job.implementation.cpu_only_reason:
        return job.implementation.cpu_only_reason
    if job.device == "cpu" and job.requires_cuda:
        return "needs a CUDA GPU"
    if job.device == "cpu" and job.measure.graph:
        return "graph=true needs a CUDA GPU"
    return job.workload.unsupported_reason(job)
