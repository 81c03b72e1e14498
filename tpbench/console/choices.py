"""The choices of the command line: what each is, whether a machine can run it, and the sections of `list`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tpbench import packages
from tpbench.launcher.options import CONF, read_choice, unknown_choice
from tpbench.settings import JobError, spelled
from tpbench.suggestions import unknown
from tpbench.workloads import NAMES, Variant, Workload, variants, workloads

folders = [CONF]
"""Folders of configuration files. `list` adds those of its options."""
AVAILABLE = "yes"
INTERPRETED = "interpreted: correct, but no measurement"
PRESETS = "variant=  with options"
"""Heading of the choices that are a variant with some of its options."""
TOPICS = {
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
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})


def choice_file(group: str, name: str) -> Path:
    """Return the file of a choice. Raises JobError if there is none."""
    for folder in folders:
        if (file := folder / group / f"{name}.yaml").is_file():
            return file
    raise JobError(unknown_choice(group, name, names(group)))


def choice(group: str, name: str) -> dict[str, Any]:
    """Return the values that a file of conf/ sets, with the choices of other groups, such as `model`, that it makes."""
    values = read_choice(choice_file(group, name))
    made = [item for item in values.pop("defaults", ()) if isinstance(item, dict)]
    return {str(key).rpartition("/")[2]: name for item in made for key, name in item.items()} | values


def sections_of(topic: str, gpus: int) -> list[tuple[str, list[Entry]]]:
    """Return the headings and entries of a topic: `all`, a kind of choices such as `shapes`, or a workload's name.

    The first section of a workload has its variants. Raises JobError if there is no such topic.
    """
    if topic in workloads():
        return [_variants(workloads()[topic], gpus), ("shape=", shapes(gpus, topic))]
    if topic not in ("all", *TOPICS):
        raise JobError(unknown("topic of list", topic, ("all", "fields", *TOPICS, *workloads(), "variant=NAME")))
    models = "model=  with any shape of a model; or a path to a local folder with a config.json"
    sections = [
        *(_variants(workloads()[name], gpus) for name in NAMES),
        (PRESETS, [entry for entry in _commented("variant") if entry.name not in variants()]),
        ("shape=", shapes(gpus)),
        (models, _commented("model")),
        ("loss=", _commented("loss")),
        ("+experiment=  with -m", _commented("experiment")),
        ("measure=", _commented("measure")),
    ]
    return [section for section in sections if section[0].startswith(TOPICS.get(topic, ""))]


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


def shapes(gpus: int, workload: str = "") -> list[Entry]:
    """Return the shapes with their sizes, smallest first: all of them, or those of one workload."""
    found = []
    for name in names("shape"):
        values = choice("shape", name)
        owner = values.pop("shape_workload", "any")
        ranks = math.prod(size for size in (values.get("tp_size"), values.get("dp_size")) if isinstance(size, int))
        runs = AVAILABLE if ranks <= gpus else f"no: needs {ranks} GPUs, found {gpus}" if gpus else "on the CPU"
        sizes = " ".join(f"{field}={spelled(value)}" for field, value in values.items())
        if workload in ("", owner):
            vocab = values["vocab"] if isinstance(values.get("vocab"), int) else 0  # a site's may be "128k"
            found.append(((str(owner), ranks, vocab), Entry(name, f"{owner}: {sizes}", runs)))
    return [entry for _, entry in sorted(found, key=lambda item: item[0])]


def _commented(group: str) -> list[Entry]:
    """Return the choices of a group. The summary of a choice is the first comment in its file."""
    entries = []
    for name in names(group):
        lines = choice_file(group, name).read_text(encoding="utf-8-sig").splitlines()
        comments = (line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line)
        entries.append(Entry(name, next(comments, "")))
    return entries
