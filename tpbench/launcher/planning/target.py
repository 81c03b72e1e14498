"""The machine that a sweep is planned for, and why a job cannot run there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from tpbench import packages
from tpbench.job import Job, unsupported_reason
from tpbench.launcher.devices.cores import available_cores, too_many_ranks
from tpbench.launcher.options import SweepOptions


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
    cores: int = field(default_factory=available_cores)
    max_ranks_per_core: int = SweepOptions.max_ranks_per_core

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        return "cuda" if self.gpus else "cpu"

    def skip_reason(self, job: Job) -> str | None:
        if job.device == "cuda" and job.world_size > self.gpus:
            return f"needs {job.world_size} GPUs, found {self.gpus}"
        return too_many_ranks(job, self.cores, self.max_ranks_per_core)


def invalid_reason(job: Job, target: PlanningTarget) -> str | None:
    """Return why the command line must change before this job can run, or None if it need not.

    The reasons are a combination that no machine can run, and too many ranks for the cores of this host.
    """
    limit = too_many_ranks(job, target.cores, target.max_ranks_per_core) if isinstance(target, ThisHost) else None
    return unsupported_reason(job) or limit


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
