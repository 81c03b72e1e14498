"""`python -m tpbench list TOPIC`: variants, shapes, models, losses, experiments and fields, as lines of text."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence

from tpbench import packages
from tpbench.console import fields, overview
from tpbench.console.entries import Entry
from tpbench.console.topics import sections_of
from tpbench.measure import machine
from tpbench.settings import JobError
from tpbench.workloads import Workload, workloads


def main(arguments: Sequence[str]) -> int:
    """Print the list. The exit code is 0, or 2 for invalid arguments."""
    from tpbench.console import choice  # late: it imports Hydra

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
    chosen = sections_of(topic, gpus)
    print(f"This machine: {_machine(gpus)}. The second column says whether it can run each.\n")
    for title, entries in chosen:
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
