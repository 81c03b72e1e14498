"""The choices of the command line: what each is, whether a machine can run it, and the sections of `list`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tpbench import packages
from tpbench.launcher.options import CONF, read_choice, unknown_choice
from tpbench.settings import JobError, spelled
from tpbench.suggestions import unknown
from tpbench.workloads import NAMES, Variant, Workload, variants, workloads

AVAILABLE = "yes"
ON_CPU = "on the CPU"
INTERPRETED = "interpreted: correct, but no measurement"
TOPICS = {
    "all": "",
    "variants": "variant=",
    "shapes": "shape=",
    "models": "model=",
    "losses": "loss=",
    "experiments": "+experiment=",
}
"""Kinds of choices, each with the start of its headings."""


@dataclass(frozen=True)
class Entry:
    """One choice on the command line."""

    name: str
    summary: str
    availability: str = AVAILABLE
    """`yes`, or the reason or the condition."""


def names(group: str) -> list[str]:
    """Return the choices of a configuration group."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def choice(group: str, name: str) -> dict[str, Any]:
    """Return the values that a file of conf/ sets, with the choices of other groups, such as `model`, that it makes."""
    file = CONF / group / f"{name}.yaml"
    if not file.is_file():
        raise JobError(unknown_choice(group, name, names(group)))
    values = read_choice(file)
    made = [item for item in values.pop("defaults", ()) if isinstance(item, dict)]
    return {str(key).rpartition("/")[2]: name for item in made for key, name in item.items()} | values


def sections_of(topic: str, gpus: int) -> list[tuple[str, list[Entry]]]:
    """Return the headings and entries of a topic: `all`, a kind of choices such as `shapes`, or a workload's name.

    The words of a heading before a comma name the section. Raises JobError if there is no such topic.
    """
    if topic not in TOPICS and topic not in workloads():
        raise JobError(unknown("topic of list", topic, (*TOPICS, "fields", *workloads(), "variant=NAME")))
    sections = [
        *(_variants(workloads()[name], gpus) for name in NAMES),
        ("variant=  with options", [entry for entry in _commented("variant") if entry.name not in variants()]),
        *((f"shape=  of {name}", shapes(gpus, name)) for name in NAMES),
        ("model=, with any shape of a model; or a path to a local folder with a config.json", _commented("model")),
        ("loss=", _commented("loss")),
        ("+experiment=, with -m", _commented("experiment")),
        ("measure=", _commented("measure")),
    ]
    if topic in workloads():
        return [section for section in sections if section[0].partition(",")[0].endswith(f"  of {topic}")]
    return [section for section in sections if section[0].startswith(TOPICS[topic])]


def _variants(workload: Workload, gpus: int) -> tuple[str, list[Entry]]:
    defaults, named = workload.option_defaults, workload.variants.items()
    entries = [Entry(name, variant.summary, availability(variant, gpus, defaults)) for name, variant in named]
    return f"variant=  of {workload.name}, {workload.summary}", entries


def availability(variant: Variant, gpus: int, options: Mapping[str, Any]) -> str:
    """Return whether a variant with these options runs on a machine with that many GPUs."""
    if missing := packages.missing(variant.requires):
        return f"no: needs {', '.join(missing)} (not installed)"
    if variant.requires_cuda is True and not gpus:
        return "no: needs a CUDA GPU"
    uses = variant.uses_triton
    triton = uses(SimpleNamespace(**options)) if callable(uses) else uses
    return INTERPRETED if triton and not gpus else AVAILABLE


def shapes(gpus: int, workload: str) -> list[Entry]:
    """Return the shapes of a workload with their sizes: tiny ones first, then those of fewer ranks."""
    found = []
    for name in names("shape"):
        values = choice("shape", name)
        if values.pop("shape_workload") == workload:
            ranks = math.prod(values.get(field, 1) for field in ("tp_size", "dp_size"))
            runs = AVAILABLE if ranks <= gpus else f"no: needs {ranks} GPUs, found {gpus}" if gpus else ON_CPU
            sizes = " ".join(f"{field}={spelled(value)}" for field, value in values.items())
            found.append(((not name.startswith("tiny"), ranks, values.get("vocab", 0)), Entry(name, sizes, runs)))
    return [entry for _, entry in sorted(found, key=lambda item: item[0])]


def _commented(group: str) -> list[Entry]:
    """Return the choices of a group. The summary of a choice is the first comment in its file."""
    entries = []
    for name in names(group):
        lines = (CONF / group / f"{name}.yaml").read_text().splitlines()
        comments = (line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line)
        entries.append(Entry(name, next(comments, "")))
    return entries
