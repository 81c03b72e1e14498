"""The choices of the command line with their summaries, and whether a machine can run each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tpbench import packages
from tpbench.console import defaults
from tpbench.console.defaults import CONF
from tpbench.outside.installed import installed_names
from tpbench.outside.variant import from_entry_point
from tpbench.settings import JobError, spelled
from tpbench.workloads import Variant, Workload, workloads

AVAILABLE = "yes"
INTERPRETED = "interpreted: correct, but no measurement"


@dataclass(frozen=True)
class Entry:
    """One choice on the command line."""

    name: str
    summary: str
    availability: str = AVAILABLE
    """`yes`, or the reason or the condition."""


def sections(gpus: int) -> list[tuple[str, list[Entry]]]:
    """Return all entries under their headings, for a machine with that many GPUs."""
    models = "model=  of train_step, with any of its shapes; or a path to a local folder with a config.json"
    return [
        *(variant_section(workload, gpus) for workload in workloads().values()),
        ("shape=", shapes(gpus)),
        (models, _commented("model")),
        ("loss=", _commented("loss")),
        ("+experiment=  with -m", _commented("experiment")),
    ]


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
    fields = {name: defaults.choice("shape", name) for name in names("shape")}

    def order(name: str) -> tuple[str, int, int, str]:
        return fields[name]["shape_workload"], _ranks(fields[name]), fields[name].get("vocab", 0), name

    chosen = [name for name in sorted(fields, key=order) if workload in ("", fields[name]["shape_workload"])]
    return [Entry(name, _sizes(fields[name]), _enough(_ranks(fields[name]), gpus)) for name in chosen]


def names(group: str) -> list[str]:
    """Return the choices of a configuration group."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def _commented(group: str) -> list[Entry]:
    """Return the choices of a group. The summary of a choice is the first comment in its file."""
    return [Entry(name, _comment(CONF / group / f"{name}.yaml")) for name in names(group)]


def _comment(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = (line.lstrip("# ").rstrip() for line in lines if line.startswith("#") and "@package" not in line)
    return next(comments, "")


def variant_section(workload: Workload, gpus: int) -> tuple[str, list[Entry]]:
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


def _sizes(fields: dict[str, Any]) -> str:
    sizes = " ".join(f"{name}={spelled(value)}" for name, value in fields.items() if name != "shape_workload")
    return f"{fields['shape_workload']}: {sizes}"


def _ranks(fields: dict[str, Any]) -> int:
    return int(fields.get("tp_size", 1)) * int(fields.get("dp_size", 1))


def _enough(ranks: int, gpus: int) -> str:
    if not gpus:
        return "on the CPU"
    return AVAILABLE if ranks <= gpus else f"no: needs {ranks} GPUs, found {gpus}"
