"""`python -m tpbench list fields`: the fields of jobs, with their defaults, values and help, as text."""

from __future__ import annotations

import dataclasses
import textwrap
import typing
from collections.abc import Collection, Sequence
from typing import Any

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
    default: str | None
    """None for a field without a default."""
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


def field_lines(settings: type[Any], names: Collection[str]) -> list[str]:
    """Return the lines of some fields of a settings class."""
    return _lines([each for each in settings_fields(settings) if each.name in names])


def settings_fields(settings: type[Any]) -> list[Field]:
    """Return the fields of a settings class as text, without those that hold other settings."""
    hints = typing.get_type_hints(settings)
    return [
        Field(each.name, _default(each), _choices(hints[each.name]), _limits(each), each.metadata["help"])
        for each in dataclasses.fields(settings)
        if not _holds_fields(hints[each.name])
    ]


def _holds_fields(hint: Any) -> bool:
    """Return True for a field that holds fields of its own."""
    return hint is Any or any(map(dataclasses.is_dataclass, (hint, *typing.get_args(hint))))


def _default(field: dataclasses.Field[Any]) -> str | None:
    if field.default is dataclasses.MISSING:
        return None
    value = field.default
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _choices(hint: Any) -> list[str]:
    return list(map(str, typing.get_args(hint))) if typing.get_origin(hint) is typing.Literal else []


def _limits(field: dataclasses.Field[Any]) -> str:
    limits = (("at least", field.metadata["low"]), ("at most", field.metadata["high"]))
    return ", ".join(f"{words} {limit}" for words, limit in limits if limit is not None)


def _section(owner: str, found: Sequence[Field]) -> str:
    return "\n".join([f"Fields {owner}, as NAME=DEFAULT", *_lines(found)]) + "\n"


def _lines(found: Sequence[Field]) -> list[str]:
    """Return wrapped lines: NAME=DEFAULT, then the help with the valid values."""
    heads = [f"{each.name}={each.default or ''}" for each in found]
    width = max(map(len, heads), default=0)
    lines = []
    for head, each in zip(heads, found, strict=True):
        values = " ".join(each.choices) or each.limits
        text = f"{each.help} [{values}]" if values else each.help
        first, other = f"  {head:<{width}}  ", " " * (width + 4)
        lines += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=other)
    return lines
