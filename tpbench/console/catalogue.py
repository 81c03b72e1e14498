"""The choices of the command line: their summaries, whether a machine can run each, and the topics of `list`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tpbench import packages
from tpbench.console import fields
from tpbench.console.fields import CONF, names
from tpbench.outside.variant import from_entry_point, installed_names
from tpbench.settings import JobError, spelled
from tpbench.suggestions import unknown
from tpbench.workloads import Variant, Workload, variants, workloads

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


def sections_of(topic: str, gpus: int) -> list[tuple[str, list[Entry]]]:
    """Return the sections of a topic: `all`, a kind of choices such as `shapes`, or the name of a workload.

    The first section of a workload has its variants. Raises JobError if there is no such topic.
    """
    if topic in workloads():
        workload = workloads()[topic]
        return [variant_section(workload, gpus), ("shape=", shapes(gpus, topic))]
    all_sections = [*sections(gpus), *installed_section(gpus)]
    if topic == "all":
        return all_sections
    if topic not in TOPICS:
        raise JobError(unknown("topic of list", topic, ("all", "fields", *TOPICS, *workloads(), "variant=NAME")))
    return [(title, entries) for title, entries in all_sections if title.startswith(TOPICS[topic])]


def sections(gpus: int) -> list[tuple[str, list[Entry]]]:
    """Return all entries under their headings, for a machine with that many GPUs."""
    models = "model=  of train_step, with any of its shapes; or a path to a local folder with a config.json"
    presets = [entry for entry in _commented("variant") if entry.name not in variants()]
    return [
        *(variant_section(workload, gpus) for workload in workloads().values()),
        (PRESETS, presets),
        ("shape=", shapes(gpus)),
        (models, _commented("model")),
        ("loss=", _commented("loss")),
        ("+experiment=  with -m", _commented("experiment")),
    ]


def variant_section(workload: Workload, gpus: int) -> tuple[str, list[Entry]]:
    """Return the heading and the entries of a workload's variants."""
    entries = [
        Entry(name, variant.summary, availability(variant, gpus, workload.option_defaults))
        for name, variant in workload.variants.items()
    ]
    return f"variant=  of {workload.name}, {workload.summary}", entries


def installed_section(gpus: int) -> list[tuple[str, list[Entry]]]:
    """Return the variants of installed packages, if there are any. None of the packages is imported."""
    entries = []
    for name in installed_names():
        try:
            found = from_entry_point(name)
        except JobError as error:
            entries.append(Entry(name, f"no: {error}"))
        else:
            available = availability(found.variant, gpus, found.of_workload.option_defaults)
            entries.append(Entry(name, f"{found.summary} ({found.workload})", available))
    return [("variant=  of installed packages", entries)] if entries else []


def availability(variant: Variant, gpus: int, options: Mapping[str, Any]) -> str:
    """Return whether a variant with these options runs on a machine with that many GPUs."""
    missing = [name for name in variant.requires if not packages.installed(name)]
    if missing:
        return f"no: needs {', '.join(missing)} (not installed)"
    if variant.requires_cuda is True and not gpus:
        return "no: needs a CUDA GPU"
    uses = variant.uses_triton
    triton = uses(SimpleNamespace(**options)) if callable(uses) else uses
    return INTERPRETED if triton and not gpus else AVAILABLE


def shapes(gpus: int, workload: str = "") -> list[Entry]:
    """Return the shapes with their sizes, smallest first: all of them, or those of one workload."""
    values = {name: fields.choice("shape", name) for name in names("shape")}

    def order(name: str) -> tuple[str, int, int, str]:
        return values[name]["shape_workload"], _ranks(values[name]), values[name].get("vocab", 0), name

    chosen = [name for name in sorted(values, key=order) if workload in ("", values[name]["shape_workload"])]
    return [Entry(name, _sizes(values[name]), _enough(_ranks(values[name]), gpus)) for name in chosen]


def _commented(group: str) -> list[Entry]:
    """Return the choices of a group. The summary of a choice is the first comment in its file."""
    return [Entry(name, _comment(CONF / group / f"{name}.yaml")) for name in names(group)]


def _comment(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line), "")


def _sizes(values: Mapping[str, Any]) -> str:
    sizes = " ".join(f"{name}={spelled(value)}" for name, value in values.items() if name != "shape_workload")
    return f"{values['shape_workload']}: {sizes}"


def _ranks(values: Mapping[str, Any]) -> int:
    return int(values.get("tp_size", 1)) * int(values.get("dp_size", 1))


def _enough(ranks: int, gpus: int) -> str:
    if not gpus:
        return "on the CPU"
    return AVAILABLE if ranks <= gpus else f"no: needs {ranks} GPUs, found {gpus}"
