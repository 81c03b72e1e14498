"""`python -m tpbench list fields`: the fields of jobs, with their defaults, values and help, as text."""

from __future__ import annotations

import dataclasses
import textwrap
import typing
from collections.abc import Collection, Sequence
from typing import Any

from tpbench.console.defaults import Default, defaults
from tpbench.job import Job
from tpbench.launcher.options import SweepOptions
from tpbench.measure.settings import MeasureSettings
from tpbench.workloads import workloads

WIDTH = 100
"""Most columns of a line."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field as text."""

    name: str
    default: Default
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
    return _lines([each for each in settings_fields(settings, variant) if each.name in names])


def settings_fields(settings: type[Any], variant: str = "") -> list[Field]:
    """Return the fields of a settings class as text, without those that hold other settings.

    The defaults are those of that variant's jobs, if there is such a variant.
    """
    hints = typing.get_type_hints(settings)
    default_of = defaults(settings, variant)
    return [
        Field(each.name, default_of[each.name], _choices(hints[each.name]), _limits(each), each.metadata["help"])
        for each in dataclasses.fields(settings)
        if not _holds_fields(hints[each.name])
    ]


def _holds_fields(hint: Any) -> bool:
    """Return True for a field that holds fields of its own."""
    return hint is Any or any(map(dataclasses.is_dataclass, (hint, *typing.get_args(hint))))


def _choices(hint: Any) -> list[str]:
    return list(map(str, typing.get_args(hint))) if typing.get_origin(hint) is typing.Literal else []


def _limits(field: dataclasses.Field[Any]) -> str:
    limits = (("at least", field.metadata["low"]), ("at most", field.metadata["high"]))
    return ", ".join(f"{words} {limit}" for words, limit in limits if limit is not None)


def _section(owner: str, found: Sequence[Field]) -> str:
    return "\n".join([f"Fields {owner}, as NAME=DEFAULT", *_lines(found)]) + "\n"


def _values(field: Field) -> str:
    """Return the valid values of a field, with the group that sets it."""
    group = f"{'or ' * (field.default.value is not None)}from {field.default.group}=" if field.default.group else ""
    return "; ".join(filter(None, (" ".join(field.choices) or field.limits, group)))


def _lines(found: Sequence[Field]) -> list[str]:
    """Return wrapped lines: NAME=DEFAULT, then the help with the valid values."""
    heads = [f"{each.name}={each.default.value or ''}" for each in found]
    width = max(map(len, heads), default=0)
    lines = []
    for head, each in zip(heads, found, strict=True):
        text = f"{each.help} [{values}]" if (values := _values(each)) else each.help
        first, other = f"  {head:<{width}}  ", " " * (width + 4)
        lines += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=other)
    return lines
