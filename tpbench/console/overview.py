"""`python -m tpbench list` without arguments: the names of all choices on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from tpbench.console.entries import INTERPRETED, Entry, shapes
from tpbench.console.topics import sections_of
from tpbench.workloads import workloads

LINES, COLUMNS = 40, 100
"""Size of the screen that the overview fits into."""

_LABEL = 18
"""Columns of the labels."""
_MORE = (
    ("list entropy_loss", "a workload: a line for each variant and shape, and its fields"),
    ("list variant=triton_tp", "one choice: what it is, whether it runs here, its options, a command"),
    ("list variants", "a line for each variant: whether it runs here, and what to install"),
    ("list shapes", "a line for each shape; so do models, losses, experiments, fields"),
    ("list all", "every choice with its line"),
)


def overview(machine: str, gpus: int) -> str:
    """Return the names of all choices, for a machine with that many GPUs."""
    lines = [f"This machine: {machine}. A choice marked with - cannot run on it."]
    if not gpus:
        lines.append("A choice marked with ~ runs in Triton's interpreter: correct, but its time is no measurement.")
    lines += ["", "variant=  by workload"]
    for name in workloads():
        lines += _wrapped(f"  {name}", _names(sections_of(name, gpus)[0][1]))
    lines += ["", "shape=  by workload"]
    for name in workloads():
        lines.append(_one_line(f"  {name}", _names(shapes(gpus, name))))
    lines.append("")
    for label, topic in (("model=", "models"), ("loss=", "losses"), ("+experiment=", "experiments")):
        lines += _wrapped(label, (entry.name for _, entries in sections_of(topic, gpus) for entry in entries))
    width = max(len(command) for command, _ in _MORE)
    lines += ["", "More:  python -m tpbench ..."]
    lines += [f"  {command:<{width}}  {meaning}" for command, meaning in _MORE]
    return "\n".join(lines) + "\n"


def _names(entries: Sequence[Entry]) -> list[str]:
    """Return the names, with a mark before each that this machine cannot run or cannot measure."""
    return [f"{_mark(entry.availability)}{entry.name}" for entry in entries]


def _mark(availability: str) -> str:
    return "-" if availability.startswith("no") else "~" if availability == INTERPRETED else ""


def _one_line(label: str, names: Sequence[str]) -> str:
    """Return a label and the names that fit behind it, the tiny shapes first, with the number of the others."""
    ordered = sorted(names, key=lambda name: not name.lstrip("-~").startswith("tiny"))
    for count in range(len(ordered), 0, -1):
        rest = f" and {len(ordered) - count} more" if count < len(ordered) else ""
        line = f"{label:<{_LABEL}}{' '.join(ordered[:count])}{rest}"
        if len(line) <= COLUMNS:
            return line
    return label


def _wrapped(label: str, names: Iterable[str]) -> list[str]:
    """Return lines with a label before the first one."""
    text = " ".join(names)
    lines = textwrap.wrap(text, COLUMNS - _LABEL, break_long_words=False, break_on_hyphens=False)
    return [f"{label if at == 0 else '':<{_LABEL}}{line}" for at, line in enumerate(lines)]
