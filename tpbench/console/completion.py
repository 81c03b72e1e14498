"""Completion of the command line in bash: subcommands and their topics, fields, and values, also of a list."""

from __future__ import annotations

import dataclasses
import typing

from tpbench.console.choices import TOPICS, names
from tpbench.console.docs import PAGES
from tpbench.job import Job
from tpbench.launcher.options import GROUPS, SweepOptions
from tpbench.launcher.slurm.cluster import SlurmSettings
from tpbench.measure.session import MeasureSettings
from tpbench.workloads import workloads


def candidates(line: str, commands: typing.Iterable[str]) -> list[str]:
    """Return the words that the last word of a command line may become."""
    words = line.split(" ")
    word, before = words[-1], [word for word in words[:-1] if word]
    if before[1:2] and before[1] in commands and "=" not in word:
        topics = {"docs": PAGES, "list": [*TOPICS, "all", "fields", *workloads()]}.get(before[1], ())
        return sorted(topic for topic in topics if topic.startswith(word))
    sign = word[:1] if word.startswith(("+", "~")) else ""
    name, equals, text = word.removeprefix(sign).partition("=")
    values = _values()
    if not equals:
        words = [f"{sign}{name}=" for name in values] + ([*commands] if len(before) == 1 else [])
        return sorted(word for word in words if word.startswith(f"{sign}{name}"))
    others, comma, last = text.rpartition(",")
    used = others.split(",")
    valid = [value for value in values.get(name, ()) if value.startswith(last) and value not in used]
    return [f"{sign}{name}={others}{comma}{value}" for value in valid]


def _values() -> dict[str, list[str]]:
    """Return each name of the command line with its values, if they are few."""
    values: dict[str, list[str]] = {}
    for settings in (Job, MeasureSettings, SweepOptions, *(workload.problem for workload in workloads().values())):
        hints = typing.get_type_hints(settings)
        for field in dataclasses.fields(settings):
            hint = hints[field.name]
            literal = typing.get_origin(hint) is typing.Literal
            values[field.name] = ["true", "false"] if hint is bool else list(map(str, typing.get_args(hint))) * literal
    slurm: dict[str, list[str]] = {f"hydra.launcher.{field.name}": [] for field in dataclasses.fields(SlurmSettings)}
    return values | slurm | {group: names(group) for group in (*GROUPS, "hydra/launcher")}
