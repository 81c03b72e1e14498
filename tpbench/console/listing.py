"""`python -m tpbench list TOPIC`: variants, shapes, models, losses, experiments and fields.

Each variant and shape shows whether this machine can run it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

import tpbench
from tpbench import packages
from tpbench.measure import machine
from tpbench.outside.installed import installed_names
from tpbench.outside.variant import from_entry_point
from tpbench.settings import JobError, unknown
from tpbench.workloads import Variant, Workload, workloads

CONF = Path(tpbench.__file__).resolve().parent / "conf"
AVAILABLE = "yes"
INTERPRETED = "interpreted: right, but no measurement"
TOPICS = ("variants", "shapes", "models", "losses", "experiments")


@dataclass(frozen=True)
class Entry:
    """One choice on the command line."""

    name: str
    summary: str
    availability: str = AVAILABLE
    """`yes`, or the reason or the condition."""


def main(arguments: Sequence[str]) -> int:
    """Print the list. The exit code is 0, or 2 for invalid arguments."""
    from tpbench.console import choice, fields, overview  # late: they import this module

    gpus = machine.gpu_count()
    try:
        if not arguments:
            print(overview.overview(_machine(gpus), gpus), end="")
        for topic in arguments:
            group, equals, name = topic.lstrip("+").partition("=")
            if equals:
                print(choice.description(group, name, gpus), end="")
            elif topic == "fields":
                print(fields.all_fields(), end="")
            else:
                _print_sections(topic, gpus)
            if topic in workloads():
                print(fields.fields_of(topic), end="")
    except JobError as error:
        print(f"tpbench: {error}", file=sys.stderr)
        return 2
    return 0


def _print_sections(topic: str, gpus: int) -> None:
    found = sections_of(topic, gpus)
    print(f"This machine: {_machine(gpus)}. The second column says whether it can run each.\n")
    for title, entries in found:
        print(title, *_aligned(entries), "", sep="\n")
    if topic in ("all", "variants", *workloads()):
        own = [workloads()[topic]] if topic in workloads() else list(workloads().values())
        for command in _install_commands(own):
            print(command)


def _install_commands(owners: Sequence[Workload]) -> list[str]:
    """Return a line for each extra of which a variant's package is missing, with the command that installs it."""
    required = {name for each in owners for variant in each.variants.values() for name in variant.requires}
    missing = sorted(name for name in required & set(packages.EXTRAS) if not packages.installed(name))
    by_extra = itertools.groupby(sorted(missing, key=packages.EXTRAS.__getitem__), key=packages.EXTRAS.__getitem__)
    groups = [list(names) for _, names in by_extra]
    return [f"To install {', '.join(names)}: {packages.install_commands(names)}" for names in groups]


def sections_of(topic: str, gpus: int) -> list[tuple[str, list[Entry]]]:
    """Return the sections of a topic: `all`, a kind of choices such as `shapes`, or the name of a workload.

    The first section of a workload has its variants. Raises JobError if there is no such topic.
    """
    if topic in workloads():
        workload = workloads()[topic]
        return [_variant_section(workload, gpus), ("shape=", shapes(gpus, topic))]
    found = [*sections(gpus), *_installed_section(gpus)]
    if topic == "all":
        return found
    if topic not in TOPICS:
        raise JobError(unknown("topic of list", topic, ("all", "fields", *TOPICS, *workloads(), "variant=NAME")))
    prefixes = dict(zip(TOPICS, ("variant=", "shape=", "model=", "loss=", "+experiment="), strict=True))
    return [(title, entries) for title, entries in found if title.startswith(prefixes[topic])]


def sections(gpus: int) -> list[tuple[str, list[Entry]]]:
    """Return all entries under their headings, for a machine with that many GPUs."""
    models = "model=  of train_step, with any of its shapes; or a path to a local folder with a config.json"
    return [
        *(_variant_section(workload, gpus) for workload in workloads().values()),
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
    fields = {name: _read("shape", name) for name in names("shape")}

    def order(name: str) -> tuple[str, int, int, str]:
        return fields[name].get("shape_workload", ""), _ranks(fields[name]), fields[name].get("vocab", 0), name

    chosen = [name for name in sorted(fields, key=order) if workload in ("", fields[name].get("shape_workload"))]
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


def _variant_section(workload: Workload, gpus: int) -> tuple[str, list[Entry]]:
    entries = [
        Entry(name, variant.summary, availability(variant, gpus, workload.option_defaults))
        for name, variant in workload.variants.items()
    ]
    return f"variant=  of {workload.name}, {workload.summary}", entries


def _installed_section(gpus: int) -> list[tuple[str, list[Entry]]]:
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


def _read(group: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8")) or {}


def _sizes(fields: dict[str, Any]) -> str:
    workload = fields.get("shape_workload", "")
    chosen = {str(key).rpartition("/")[2]: value for each in fields.get("defaults", ()) for key, value in each.items()}
    own = {name: value for name, value in fields.items() if name not in ("shape_workload", "defaults")}
    sizes = " ".join(f"{name}={value}" for name, value in (chosen | own).items())
    return sizes if len(workloads()) == 1 else f"{workload}: {sizes}"


def _ranks(fields: dict[str, Any]) -> int:
    return int(fields.get("tp_size", 1)) * int(fields.get("dp_size", 1))


def _enough(ranks: int, gpus: int) -> str:
    if not gpus:
        return "on the CPU"
    return AVAILABLE if ranks <= gpus else f"no: needs {ranks} GPUs, found {gpus}"


def _machine(gpus: int) -> str:
    facts = machine.facts()
    if gpus:
        return f"{gpus} x {facts.get('gpu_name', 'GPU')}"
    return f"no GPU, {facts['cpu_count']} cores, {machine.available_memory_gib():.0f} GiB free"


def _aligned(entries: Iterable[Entry]) -> list[str]:
    entries = list(entries)
    first = max((len(entry.name) for entry in entries), default=0)
    second = max((len(entry.availability) for entry in entries), default=0)
    return [f"  {entry.name:<{first}}  {entry.availability:<{second}}  {entry.summary}".rstrip() for entry in entries]
