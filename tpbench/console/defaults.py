"""The default of each field as a command line gets it: from the files of conf/, which may differ from the code."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import tpbench
from tpbench.job import Job
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.slurm.settings import SlurmSettings
from tpbench.measure.settings import MeasureSettings
from tpbench.settings import spelled
from tpbench.workloads import variants, workloads

CONF = Path(tpbench.__file__).resolve().parent / "conf"
SETTINGS_FILES: dict[Path, tuple[type, ...]] = {
    CONF / "config.yaml": (Job, SweepOptions),
    CONF / "measure" / "default.yaml": (MeasureSettings,),
    CONF / "hydra" / "launcher" / "torchrun_slurm.yaml": (SlurmSettings,),
    **{CONF / "workload" / f"{name}.yaml": (each.problem,) for name, each in workloads().items()},
}
"""The files that list all fields of some settings, with the settings' classes."""


@dataclasses.dataclass(frozen=True)
class Default:
    """The default of a field."""

    value: str | None
    """The value as a command line spells it, or None if the field has no default of its own."""
    group: str = ""
    """The group, such as `shape`, that sets the field: in all its choices if `value` is None, else in some of them."""


def defaults(settings: type[Any], variant: str = "") -> dict[str, Default]:
    """Return the default of each field of a settings class, by the field's name: of one variant's jobs, or of all."""
    (file,) = (file for file, classes in SETTINGS_FILES.items() if settings in classes)
    listed = _read(CONF / "config.yaml")["defaults"]
    chosen = {name: choice for each in listed if each != "_self_" for name, choice in each.items() if choice}
    values = {each.name: each.default for each in dataclasses.fields(settings)} | chosen | _read(file)
    groups = _groups(settings)
    if variant in variants():
        values |= choice("variant", variant)
        del groups["variant"]
    return {each.name: _default(each.name, values[each.name], groups) for each in dataclasses.fields(settings)}


def _default(name: str, value: Any, groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> Default:
    text = None if value is dataclasses.MISSING else spelled(value)
    for group, choices in groups.items():
        found = [choice[name] for choice in choices if name in choice and name != group]
        if group in ("shape", "model") and len(found) == len(choices):
            return Default(None, group)
        if any(each != value for each in found):
            return Default(text, group)
    return Default(text)


def _groups(settings: type[Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the contents of the files that may set fields of these settings, by group."""
    own = {name for name, each in workloads().items() if settings in (each.problem, Job)}
    names = {each.name for each in dataclasses.fields(settings)}
    contents = {
        "shape": [each for each in _files("shape") if each["shape_workload"] in own],
        "model": _files("model") if "model" in names else [],
        "variant": [each for each in _files("variant") if variants()[each["variant"]][0].name in own],
        "measure": _files("measure") if settings is MeasureSettings else [],
    }
    return {group: choices for group, choices in contents.items() if choices}


def choice(group: str, name: str) -> dict[str, Any]:
    """Return the values that a file of conf/ sets, with the choices of other groups, such as `model`, that it makes."""
    values = _read(CONF / group / f"{name}.yaml")
    made = [each for each in values.pop("defaults", ()) if isinstance(each, dict)]
    return {str(key).rpartition("/")[2]: name for each in made for key, name in each.items()} | values


@functools.cache
def _files(group: str) -> list[dict[str, Any]]:
    return [choice(group, file.stem) for file in sorted((CONF / group).glob("*.yaml"))]


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content
