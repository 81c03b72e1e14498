"""Settings of the jobs that are submitted to Slurm: hydra.launcher.NAME=VALUE with hydra/launcher=torchrun_slurm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tpbench.settings import JobError, parse, setting
from tpbench.suggestions import unknown

_COMPOUND = ("setup", "sbatch")
"""Fields that are no plain values."""


@dataclass(frozen=True)
class SlurmSettings:
    """Settings of a whole sweep."""

    partition: str | None = setting(None, help="partition that the jobs go to; null: the cluster's default")
    account: str | None = setting(None, help="account that is charged")
    qos: str | None = setting(None, help="quality of service")
    constraint: str | None = setting(None, help="features that a node must have, such as h100")
    time_limit_min: int | None = setting(
        None, help="Slurm's limit of a job in minutes; null: the longest timeout_s of its array and ten minutes", low=1
    )
    gpus_per_node: int | None = setting(
        None, help="GPUs of a node, for jobs on CPUs the ranks of a node; null: as sinfo reports the partition", low=1
    )
    cpus_per_task: int | None = setting(
        None,
        help="cores for all ranks of a node; null: the cluster's default, for jobs on CPUs one for each rank",
        low=1,
    )
    mem_gib: float | None = setting(
        None, help="main memory of a node that a job may use; null: the cluster's default", low=0.1
    )
    array_parallelism: int = setting(
        256, help="jobs with equal resources that may run at once, over all their arrays", low=1
    )
    requeues: int = setting(
        3, help="times that a job is requeued after Slurm's time limit; a preempted job is always requeued", low=0
    )
    signal_delay_s: int = setting(90, help="seconds before the time limit at which Slurm signals the job", low=1)
    poll_s: float = setting(2.0, help="seconds between two queries of the queue", low=0.1)
    setup: tuple[str, ...] = setting(
        (), help='shell lines to run on each node beforehand, such as ["module load cuda"]'
    )
    sbatch: tuple[tuple[str, str], ...] = setting(
        (),
        help="further arguments of sbatch, with a plus: '+hydra.launcher.sbatch={mail-type: END, reservation: tests}'",
    )

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> SlurmSettings:
        """Return the settings with these values. Raises JobError for an unknown name or an invalid value."""
        valid = {each.name for each in fields(cls)}
        if errors := [unknown("option of torchrun_slurm", name, valid) for name in values if name not in valid]:
            raise JobError("\n".join(errors))
        setup, sbatch = values.get("setup") or [], values.get("sbatch") or {}
        if isinstance(setup, str):
            setup = [setup]
        if not isinstance(setup, list) or not isinstance(sbatch, Mapping):
            raise JobError("setup must be a list of shell lines, sbatch a mapping such as {mail-type: END}")
        plain: SlurmSettings = parse(cls, {name: value for name, value in values.items() if name not in _COMPOUND})
        arguments = tuple((str(name), str(value)) for name, value in sbatch.items())
        return replace(plain, setup=tuple(map(str, setup)), sbatch=arguments)
