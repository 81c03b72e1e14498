"""`python -m tpbench.console.reference > tpbench/docs/reference.md`: all choices and fields of the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tpbench.console.defaults import Default, choice
from tpbench.console.entries import names, sections
from tpbench.console.fields import settings_fields
from tpbench.job import Job
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.slurm.settings import SlurmSettings
from tpbench.measure.settings import MeasureSettings
from tpbench.settings import spelled
from tpbench.workloads import workloads

_HEAD = """\
# Reference of the command line

Made by `python -m tpbench.console.reference`. [The command line](command_line.md) explains how these are used.
"""
_DEFAULTS = """\
A command line without the field gets the default. With "from `shape=`" the choice of that group sets the field; with
"or from" only some choices do.
"""


def page() -> str:
    """Return the whole page, as Markdown."""
    parts = [_HEAD, "## Choices\n"]
    for title, entries in sections(gpus=0):
        rows = ((f"`{entry.name}`", entry.summary) for entry in entries)
        parts += [f"### {' '.join(title.split())}\n", _table(("name", "meaning"), rows)]
    parts += ["### block_cap=\n", " ".join(f"`{name}`" for name in names("block_cap")) + "\n"]
    for group in ("measure", "+contender"):
        parts += [f"### {group}=\n", _table(("name", "fields"), _contents(group.lstrip("+")))]
    parts.append("## Fields\n\n" + _DEFAULTS)
    parts += _fields("of every job", Job)
    parts += _fields("of a measurement", MeasureSettings)
    parts += _fields("of a whole sweep", SweepOptions)
    for workload in workloads().values():
        parts += _fields(f"of {workload.name}", workload.problem)
    parts += _fields("of Slurm jobs: hydra.launcher.NAME=VALUE", SlurmSettings)
    return "\n".join(parts)


def _contents(group: str) -> Iterable[tuple[str, str]]:
    """Yield each choice of a group with the fields that it sets."""
    for name in names(group):
        fields = choice(group, name)
        yield f"`{name}`", " ".join(f"`{field}={spelled(value)}`" for field, value in fields.items() if field != group)


def _fields(owner: str, settings: type[Any]) -> list[str]:
    rows = (
        (
            f"`{each.name}`",
            _default_cell(each.default),
            " ".join(f"`{choice}`" for choice in each.choices) or each.limits,
            each.help,
        )
        for each in settings_fields(settings)
    )
    return [f"### Fields {owner}\n", _table(("name", "default", "values", "meaning"), rows)]


def _default_cell(default: Default) -> str:
    """Return the default as Markdown, with the group that sets the field."""
    parts = [f"`{default.value}`" * (default.value is not None), f"from `{default.group}=`" * bool(default.group)]
    return " or ".join(filter(None, parts))


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [_line(heads), _line(["---"] * len(heads)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
