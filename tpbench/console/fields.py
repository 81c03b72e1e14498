"""The fields of jobs and sweeps with their defaults, as `list` and the reference show them.

A default is what a command line gets: from the files of conf/, which may differ from the code.
"""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import tpbench
from tpbench.job import Job
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.slurm.cluster import SlurmSettings
from tpbench.measure.session import MeasureSettings
from tpbench.settings import spelled
from tpbench.workloads import variants, workloads

CONF = Path(tpbench.__file__).resolve().parent / "conf"
WIDTH = 100
"""Most columns of a line."""
_FILES = {
    Job: "config",
    SweepOptions: "config",
    MeasureSettings: "measure/default",
    SlurmSettings: "hydra/launcher/torchrun_slurm",
    **{workload.problem: f"workload/{name}" for name, workload in workloads().items()},
}
"""The file of conf/ that lists all fields of a settings class."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field as text."""

    name: str
    default: str | None
    """The default as a command line spells it, or None if the field has no default of its own."""
    group: str
    """The group, such as `shape`, that sets the field: in all its choices if `default` is None, else in some of them.
    Empty if no group sets it."""
    choices: Sequence[str]
    """All valid values, if they are few."""
    limits: str
    """Limits of a number, empty without such."""
    help: str


def all_fields() -> str:
    """Return the fields of every job, of a measurement, of a whole sweep and of each workload."""
    owners = (("of every job", Job), ("of a measurement", MeasureSettings), ("of a whole sweep", SweepOptions))
    shared = [_section(owner, settings_fields(settings)) for owner, settings in owners]
    return "\n".join([*shared, *map(fields_of, workloads())])


def fields_of(workload: str) -> str:
    """Return the fields of one workload's problem."""
    return _section(f"of {workload}", settings_fields(workloads()[workload].problem))


def field_lines(settings: type[Any], names: Collection[str], variant: str) -> list[str]:
    """Return the lines of some fields of a settings class, with the defaults of that variant's jobs."""
    return _lines([field for field in settings_fields(settings, variant) if field.name in names])


def settings_fields(settings: type[Any], variant: str = "") -> list[Field]:
    """Return the fields of a settings class as text, without those that hold other settings.

    The defaults are those of that variant's jobs, if there is such a variant.
    """
    listed = read("config")["defaults"]
    chosen = {name: choice for item in listed if item != "_self_" for name, choice in item.items() if choice}
    values = {field.name: field.default for field in dataclasses.fields(settings)} | chosen | read(_FILES[settings])
    groups = _groups(settings)
    if variant in variants():
        values |= choice("variant", variant)
        del groups["variant"]
    hints = typing.get_type_hints(settings)
    return [
        Field(
            field.name,
            *_default(field.name, values[field.name], groups),
            list(map(str, typing.get_args(hint))) if typing.get_origin(hint) is typing.Literal else [],
            _limits(field),
            field.metadata["help"],
        )
        for field in dataclasses.fields(settings)
        if not _holds_fields(hint := hints[field.name])
    ]


def choice(group: str, name: str) -> dict[str, Any]:
    """Return the values that a file of conf/ sets, with the choices of other groups, such as `model`, that it makes."""
    values = read(f"{group}/{name}")
    made = [item for item in values.pop("defaults", ()) if isinstance(item, dict)]
    return {str(key).rpartition("/")[2]: name for item in made for key, name in item.items()} | values


def _default(name: str, value: Any, groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str | None, str]:
    """Return the default of a field and the group that sets it. `groups`: what each choice of a group sets."""
    text = None if value is dataclasses.MISSING else spelled(value)
    for group, choices in groups.items():
        found = [values[name] for values in choices if name in values and name != group]
        if group in ("shape", "model") and len(found) == len(choices):
            return None, group
        if any(other != value for other in found):
            return text, group
    return text, ""


def _groups(settings: type[Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the contents of the files that may set fields of these settings, by group."""
    owners = {name for name, workload in workloads().items() if settings in (workload.problem, Job)}
    names = {field.name for field in dataclasses.fields(settings)}
    contents = {
        "shape": [values for values in _contents("shape") if values["shape_workload"] in owners],
        "model": _contents("model") if "model" in names else [],
        "variant": [values for values in _contents("variant") if variants()[values["variant"]][0].name in owners],
        "measure": _contents("measure") if settings is MeasureSettings else [],
    }
    return {group: choices for group, choices in contents.items() if choices}


@functools.cache
def _contents(group: str) -> list[dict[str, Any]]:
    """Return what each choice of a group sets. Of the group `variant`: each variant, without presets of options."""
    return [choice(group, name) for name in names(group) if group != "variant" or name in variants()]


def names(group: str) -> list[str]:
    """Return the choices of a configuration group."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def read(name: str) -> dict[str, Any]:
    """Return the content of the file conf/NAME.yaml."""
    content: dict[str, Any] = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


def _holds_fields(hint: Any) -> bool:
    return hint is Any or any(map(dataclasses.is_dataclass, (hint, *typing.get_args(hint))))


def _limits(field: dataclasses.Field[Any]) -> str:
    limits = (("at least", field.metadata["low"]), ("at most", field.metadata["high"]))
    return ", ".join(f"{words} {limit}" for words, limit in limits if limit is not None)


def _section(owner: str, fields: Sequence[Field]) -> str:
    return "\n".join([f"Fields {owner}, as NAME=DEFAULT", *_lines(fields)]) + "\n"


def _lines(fields: Sequence[Field]) -> list[str]:
    """Return wrapped lines: NAME=DEFAULT, then the help with the valid values and the group that sets the field."""
    heads = [f"{field.name}={field.default or ''}" for field in fields]
    width = max(map(len, heads), default=0)
    lines = []
    for head, field in zip(heads, fields, strict=True):
        group = f"{'or ' * (field.default is not None)}from {field.group}=" if field.group else ""
        values = "; ".join(filter(None, (" ".join(field.choices) or field.limits, group)))
        text = f"{field.help} [{values}]" if values else field.help
        first, other = f"  {head:<{width}}  ", " " * (width + 4)
        lines += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=other)
    return lines
