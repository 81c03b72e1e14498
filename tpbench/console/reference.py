"""`python -m tpbench.console.reference > tpbench/docs/reference.md`: all choices and fields of the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tpbench.console.fields import settings_fields
from tpbench.console.listing import names, sections
from tpbench.job import Job
from tpbench.launcher.options import SweepOptions
from tpbench.measure.settings import MeasureSettings
from tpbench.workloads import workloads

_HEAD = """\
# Reference of the command line

Made by `python -m tpbench.console.reference`. [The command line](command_line.md) explains how these are used.
"""


def page() -> str:
    """Return the whole page, as Markdown."""
    parts = [_HEAD, "## Choices\n"]
    for title, entries in sections(gpus=0):
        rows = ((f"`{entry.name}`", entry.summary) for entry in entries)
        parts += [f"### {' '.join(title.split())}\n", _table(("name", "meaning"), rows)]
    for group in ("block_cap", "measure", "contender"):
        parts += [f"### {group}=\n", " ".join(f"`{name}`" for name in names(group)) + "\n"]
    parts.append("## Fields\n")
    parts += _fields("of every job", Job)
    parts += _fields("of a measurement", MeasureSettings)
    parts += _fields("of a whole sweep", SweepOptions)
    for workload in workloads().values():
        parts += _fields(f"of {workload.name}", workload.problem)
    return "\n".join(parts)


def _fields(owner: str, settings: type[Any]) -> list[str]:
    rows = (
        (
            f"`{each.name}`",
            "" if each.default is None else f"`{each.default}`",
            " ".join(f"`{choice}`" for choice in each.choices) or each.limits,
            each.help,
        )
        for each in settings_fields(settings)
    )
    return [f"### Fields {owner}\n", _table(("name", "default", "values", "meaning"), rows)]


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [_line(heads), _line(["---"] * len(heads)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
