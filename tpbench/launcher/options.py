"""The names that a command line may have: options of a whole sweep, groups and files of conf/, and commands."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

import tpbench
from tpbench.job import Job, field_names
from tpbench.measure.session import MeasureSettings
from tpbench.settings import JobError, defaults, setting
from tpbench.suggestions import printable, unknown
from tpbench.workloads import NAMES, Workload, workloads


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
    wait: bool = setting(
        True, help="false: submit the jobs to Slurm and exit; `tpbench collect` or resume=true collects the rows"
    )


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


def command_line_names(workload: Workload | None = None) -> set[str]:
    """Return the flat names that a command line may set, for jobs of one workload or of any."""
    return field_names(workload) | SWEEP_OPTION_NAMES


def store_defaults() -> None:
    """Store Hydra's nodes of defaults: of every job as `job_defaults`, of a workload as `workload/NAME`, `variant=all`.

    A field's default stands in its dataclass only, and other values may refer to it. The nodes have no types, because
    OmegaConf has no `Literal`: `tpbench.settings.parse` checks values.
    """
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
    of_model = "; a folder with a config.json is model=./FOLDER, a class in a file model=FILE.py:NAME"
    return unknown(group, choice, valid, where) + (of_model if group == "model" else "")


def read_choice(file: Path) -> dict[str, Any]:
    """Return what a file of YAML sets. Raises JobError if the file isn't a mapping."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeError) as error:
        raise JobError(f"{file} is no file of YAML: {printable(str(error))}") from None
    if not isinstance(content, dict):
        raise JobError(f"{file} has no lines NAME: VALUE")
    return content
