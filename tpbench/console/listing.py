"""`python -m tpbench list`: what can be asked for, a line each, and whether this machine can run it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

import tpbench
from tpbench.measure import machine
from tpbench.workloads import Variant, workloads

CONF = Path(tpbench.__file__).resolve().parent / "conf"
HERE = "yes"


@dataclass(frozen=True)
class Entry:
    """Something that can be asked for."""

    name: str
    summary: str
    here: str = HERE
    """`yes`, or why not, or under which condition."""


def main(arguments: Sequence[str]) -> int:
    """Print the list; the exit code is 0, or 2 for arguments that it does not take."""
    if arguments:
        print(f"tpbench: list takes no arguments, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    gpus = machine.gpu_count()
    print(f"This machine: {_machine(gpus)}. The second column says whether it can run each.\n")
    for title, entries in sections(gpus):
        print(title)
        for line in _aligned(entries):
            print(line)
        print()
    return 0


def sections(gpus: int) -> list[tuple[str, list[Entry]]]:
    """Everything, under its headings."""
    made = []
    for workload in workloads().values():
        found = [
            Entry(name, variant.summary, here(variant, gpus, workload.option_defaults))
            for name, variant in workload.variants.items()
        ]
        made.append((f"variant=  of {workload.name}, {workload.summary}", found))
    made.append(("shape=", shapes(gpus)))
    models = [Entry(name, comment("model", name)) for name in names("model")]
    made.append(
        ("model=  of train_step, with any of its shapes; or a path to a local folder with a config.json", models)
    )
    made.append(("loss=", [Entry(name, comment("loss", name)) for name in names("loss")]))
    made.append(("+experiment=  with -m", [Entry(name, comment("experiment", name)) for name in names("experiment")]))
    return made


def here(variant: Variant, gpus: int, options: Mapping[str, Any]) -> str:
    """Whether a variant runs on this machine, with these options."""
    missing = [name for name in variant.requires if importlib.util.find_spec(name) is None]
    if missing:
        return f"no: needs {', '.join(missing)} (not installed)"
    if variant.requires_cuda is True and not gpus:
        return "no: needs a CUDA GPU"
    uses = variant.uses_triton
    triton = uses(SimpleNamespace(**options)) if callable(uses) else uses
    return "interpreted: right, but no measurement" if triton and not gpus else HERE


def shapes(gpus: int) -> list[Entry]:
    """The shapes with their sizes, smallest first."""
    found = [(name, _read("shape", name)) for name in names("shape")]
    found.sort(key=lambda item: (item[1].get("shape_workload", ""), _ranks(item[1]), item[1].get("vocab", 0), item[0]))
    return [Entry(name, _sizes(fields), _enough(_ranks(fields), gpus)) for name, fields in found]


def names(group: str) -> list[str]:
    """The choices of a configuration group."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def comment(group: str, name: str) -> str:
    """What a choice's file says of itself: its first line of comment that is no directive."""
    for line in (CONF / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").rstrip()
    return ""


def _read(group: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8")) or {}


def _sizes(fields: dict[str, Any]) -> str:
    owner = fields.get("shape_workload", "")
    chosen = {str(key).rpartition("/")[2]: value for each in fields.get("defaults", ()) for key, value in each.items()}
    named = {name: value for name, value in fields.items() if name not in ("shape_workload", "defaults")}
    sizes = " ".join(f"{name}={value}" for name, value in (chosen | named).items())
    return sizes if len(workloads()) == 1 else f"{owner}: {sizes}"


def _ranks(fields: dict[str, Any]) -> int:
    return int(fields.get("tp_size", 1)) * int(fields.get("dp_size", 1))


def _enough(ranks: int, gpus: int) -> str:
    if not gpus:
        return "on the CPU"
    return HERE if ranks <= gpus else f"no: needs {ranks} GPUs, found {gpus}"


def _machine(gpus: int) -> str:
    facts = machine.facts()
    if gpus:
        return f"{gpus} x {facts.get('gpu_name', 'GPU')}"
    return f"no GPU, {facts['cpu_count']} cores, {machine.available_memory_gib():.0f} GiB free"


def _aligned(entries: Iterable[Entry]) -> list[str]:
    entries = list(entries)
    first = max((len(entry.name) for entry in entries), default=0)
    second = max((len(entry.here) for entry in entries), default=0)
    return [f"  {entry.name:<{first}}  {entry.here:<{second}}  {entry.summary}".rstrip() for entry in entries]
