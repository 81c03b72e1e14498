"""The names that a command line may have: options of a whole sweep and of Slurm, groups of conf/, and commands."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import yaml

import tpbench
from tpbench.job import Job, field_names
from tpbench.measure.session import MeasureSettings
from tpbench.settings import JobError, defaults, parse, setting
from tpbench.suggestions import printable, unknown
from tpbench.workloads import NAMES, workloads


@dataclass(frozen=True)
class SweepOptions:
    """Options that apply to all cells of a sweep, with flat names like a job's fields. None may change a result."""

    resume: bool = setting(False, help="run only cells without a finished row of the same software and hardware")
    reuse: bool = setting(
        False, help="run all jobs of one world size and environment in one torchrun, which stays alive"
    )
    order: Literal["sequential", "interleaved"] = setting(
        "sequential",
        help="sequential, or interleaved: variants of a problem are measured alternately (ABBA); needs reuse=true",
    )
    dry_run: bool = setting(False, help="show the plan: cells, GPUs, nodes, expected minutes and OOMs; run nothing")
    gpu: Literal["A100", "H100", "H200", "B200"] | None = setting(
        None, help="with dry_run=true: plan for a machine with eight of these GPUs; null: this machine"
    )
    wait: bool = setting(
        True, help="false: submit the jobs to Slurm and exit; `tpbench collect` or resume=true collects the rows"
    )


_OWN_ARGUMENTS = frozenset(
    ("array", "error", "nodes", "no-requeue", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "requeue",
     "signal", "test-only", "time", "wait", "wrap")
)  # fmt: skip
"""Arguments of sbatch on which the planning of jobs and the reading of their answers depend."""


@dataclass(frozen=True)
class SlurmSettings:
    """Settings of a whole sweep's jobs on a Slurm cluster: `hydra.launcher.NAME`."""

    partition: str | None = setting(None, help="partition that the jobs go to; null: the cluster's default")
    account: str | None = setting(None, help="account that is charged")
    qos: str | None = setting(None, help="quality of service")
    constraint: str | None = setting(None, help="features that a node must have, such as h100")
    time_limit_min: int | None = setting(
        None, help="minutes of a job; null: ten, and timeout_s of each of its cells", low=1
    )
    gpus_per_node: int | None = setting(
        None, help="GPUs of a node, for jobs on CPUs the ranks of a node; null: as sinfo reports the partition", low=1
    )
    cpus_per_task: int | None = setting(
        None, help="cores for all ranks of a node; null: the cluster's default, on CPUs one for each rank", low=1
    )
    array_parallelism: int = setting(256, help="jobs of an array that may run at once", low=1)
    cells_per_job: int | None = setting(
        1, help="cells that a job runs one after the other; all: every cell with equal resources", low=1
    )
    requeues: int = setting(
        3, help="times that a job is requeued after Slurm's time limit; a preempted job is always requeued", low=0
    )
    signal_delay_s: int = setting(
        90, help="seconds before the time limit at which Slurm signals the job, at most half of it", low=1
    )
    poll_s: float = setting(2.0, help="seconds between two queries of the queue", low=0.1)
    setup: tuple[str, ...] = setting(
        (), help='shell lines to run beforehand, such as ["module load cuda"]; one that fails ends the job'
    )
    sbatch: tuple[tuple[str, str | bool], ...] = setting(
        (),
        help="further arguments of sbatch, with a plus: '+hydra.launcher.sbatch={mail-type: END, reservation: tests}'",
    )

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Return the settings with these values. Raises JobError for an unknown name or an invalid value."""
        valid = {field.name for field in fields(cls)}
        if errors := [unknown("option of torchrun_slurm", name, valid) for name in values if name not in valid]:
            raise JobError("\n".join(errors))
        setup, sbatch = values.get("setup") or [], values.get("sbatch") or {}
        texts = [setup] if isinstance(setup, str) else setup
        if not isinstance(texts, list) or {*map(type, texts)} - {str} or not isinstance(sbatch, Mapping):
            raise JobError("setup must be a list of shell lines, sbatch a mapping such as {mail-type: END}")
        if reserved := ", ".join(sorted({str(name).replace("_", "-") for name in sbatch} & _OWN_ARGUMENTS)):
            raise JobError(f"sbatch cannot set {reserved}: tpbench does (time: hydra.launcher.time_limit_min)")
        others = {name: value for name, value in values.items() if name not in ("setup", "sbatch")}
        cells = others.get("cells_per_job", 1)
        plain: Self = parse(cls, {**others, "cells_per_job": None if cells == "all" else cells})
        # submitit writes an argument whose value is true without one, as in `--exclusive`.
        given = {str(name): value for name, value in sbatch.items() if value is not False and value is not None}
        arguments = tuple((name, value if value is True else str(value)) for name, value in given.items())
        # A text of several lines would hide that one before the last fails, and a comment alone isn't a command.
        lines = tuple(line for text in texts for line in text.splitlines() if line.partition("#")[0].strip())
        return replace(plain, setup=lines, sbatch=arguments)


CONF = Path(tpbench.__file__).resolve().parent / "conf"

GROUPS = ("variant", "shape", "model", "loss", "block_cap", "measure", "experiment")
"""The folders of conf/ of which the command line names a choice."""

COMMANDS = {
    "report": "tpbench.report.command",
    "compare": "tpbench.report.compare",
    "history": "tpbench.report.history",
    "predict": "tpbench.predict.command",
    "collect": "tpbench.launcher.slurm.submitted",
    "compact": "tpbench.results.compact",
    "rows": "tpbench.console.rows",
    "list": "tpbench.console.listing",
    "doctor": "tpbench.console.doctor",
    "docs": "tpbench.console.docs",
    "new": "tpbench.console.new",
    "test": "tpbench.console.trials",
    "profile": "tpbench.console.trials",
}
"""Words that may stand in place of a job, as the first argument, each with the module whose `main` takes the others.
`trials` takes the word, too."""

CODE = "_target_"
"""Key of Hydra's configuration that names a Python object to call."""

SWEEP_OPTION_NAMES = frozenset(each.name for each in fields(SweepOptions))


def command_line_names() -> set[str]:
    """Return the flat names that a command line may set, for jobs of any workload."""
    return {*SWEEP_OPTION_NAMES}.union(*map(field_names, workloads().values()))


def store_defaults() -> None:
    """Store Hydra's nodes of defaults. They have no types, because OmegaConf has no `Literal`; `parse` checks."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance().store
    of_job = {"world_size": None, **defaults(SweepOptions), **defaults(Job), **defaults(MeasureSettings)}
    for name in ("measure", "problem", "outside"):  # a group, and parts of a job that no field of a file sets
        del of_job[name]
    store("job_defaults", of_job, package="_global_")
    for name in NAMES:
        store(name, defaults(workloads()[name].problem), "workload", "_global_")
    store("all", {"variant": "all"}, "variant", "_global_")  # see SweepComposer.variants_of


def aliases() -> dict[str, str]:
    """Return other names that a command line may use, each with what it stands for (`Workload.aliases`)."""
    return {name: meaning for workload in workloads().values() for name, meaning in workload.aliases.items()}


def unknown_choice(group: str, choice: str, valid: Collection[str]) -> str:
    """Return a sentence for a choice that a group does not have."""
    where = f"python -m tpbench list {group}s" if len(valid) > 25 else ""
    of_model = "; a folder with a config.json is model=./FOLDER"
    return unknown(group, choice, valid, where) + (of_model if group == "model" else "")


def read_choice(file: Path) -> dict[str, Any]:
    """Return what a file of YAML sets. Raises JobError if the file isn't a mapping."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeError) as error:
        raise JobError(f"{file} isn't a YAML file: {printable(str(error))}") from None
    if not isinstance(content, dict):
        raise JobError(f"{file} has no lines NAME: VALUE")
    return content
