"""The fastest variant of each problem on each machine of the gallery."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tpbench.report.conclusions.agreement import disagreeing_rows
from tpbench.report.conclusions.verdicts import Verdict, verdict_columns, verdicts
from tpbench.report.gallery.entry import Entry
from tpbench.report.grids.arrange import arrange_rows
from tpbench.report.grids.records import MISSING, Record, column_label, problem_identity, value_text
from tpbench.report.page.machines import FACTS
from tpbench.results.schema import workload_columns
from tpbench.workloads import workloads

ProblemKey: TypeAlias = tuple[tuple[str, Any], ...]
_SIZES = ("tokens", "tp_size", "dp_size", "nodes")


@dataclass(frozen=True)
class Machine:
    """One kind of hardware of an entry: a column of the gallery's tables."""

    entry: Entry
    hardware: str

    @property
    def name(self) -> str:
        """The title, with the hardware if the title has no model number of it."""
        models = [word for word in self.hardware.split() if any(character.isdigit() for character in word)]
        named = any(model in self.entry.title for model in models or [self.hardware])
        return self.entry.title if named else f"{self.entry.title} ({self.hardware})"


@dataclass
class Problem:
    """One problem of a workload with its verdict on each machine that measured it."""

    workload: str
    key: ProblemKey
    by_machine: dict[int, Verdict] = field(default_factory=dict)
    """Verdicts by the index of the machine."""
    name: str = ""
    """The fields in which the workload's problems differ."""

    @property
    def ranks(self) -> int:
        sizes = [dict(self.key)[name] for name in ("tp_size", "dp_size")]
        return math.prod(1 if size == MISSING else int(size) for size in sizes)

    @property
    def compared(self) -> bool:
        """True if several variants solved the problem on one machine."""
        return any(verdict.runner_up for verdict in self.by_machine.values())

    @property
    def slowest_ms(self) -> float:
        """The longest time among the machines' fastest variants."""
        return max(verdict.time_ms for verdict in self.by_machine.values())


def measured_problems(entries: Sequence[Entry]) -> tuple[list[Machine], list[Problem]]:
    """Return the machines, and the problems that some variant solved on one of them, in the order of the workloads."""
    machines: list[Machine] = []
    problems: dict[tuple[str, ProblemKey], Problem] = {}
    own = {name for columns in workload_columns().values() for name in columns}
    for entry in entries:
        arranged = arrange_rows(entry.frame, [*FACTS, *verdict_columns(), *own])
        disputed = disagreeing_rows(list(arranged.records), workloads())
        columns: dict[str, int] = {}
        for grid in arranged.grids:
            hardware = grid.facts["hardware"]
            if hardware not in columns:
                columns[hardware] = len(machines)
                machines.append(Machine(entry, hardware))
            for verdict in verdicts(grid, disputed):
                if verdict.fastest:
                    key = _problem_key(grid.workload, verdict.fastest.record)
                    problem = problems.setdefault((grid.workload, key), Problem(grid.workload, key))
                    problem.by_machine[columns[hardware]] = verdict
    order = [*workloads(), *(each.workload for each in problems.values())]  # rows may be of a workload of the future
    found = sorted(problems.values(), key=lambda each: order.index(each.workload))
    _name(found)
    return machines, found


def headlines(problems: Iterable[Problem], most: int = 24) -> list[Problem]:
    """Return the problems of the first screen: of each workload and number of ranks the most widely measured one.

    Among equally widely measured problems it is the slowest that several variants solved. At most `most` are returned,
    those of several machines first.
    """
    groups: dict[tuple[str, int], list[Problem]] = defaultdict(list)
    for each in problems:
        groups[each.workload, each.ranks].append(each)
    chosen = [
        max(group, key=lambda each: (len(each.by_machine), each.compared, each.slowest_ms)) for group in groups.values()
    ]
    kept = sorted(chosen, key=lambda each: -len(each.by_machine))[:most]
    return [each for each in chosen if any(each is other for other in kept)]


def _problem_key(workload: str, record: Record) -> ProblemKey:
    """Return the fields that identify the problem of a record, with their defaults."""
    known = workloads().get(workload)
    names: Mapping[str, Any] = dict.fromkeys(_SIZES) | (problem_identity(known) if known else {})
    return tuple(
        (name, value_text(default if record.get(name) is None else record[name])) for name, default in names.items()
    )


def _name(problems: Sequence[Problem]) -> None:
    """Name each problem by the fields in which the problems of its workload differ."""
    for workload in {each.workload for each in problems}:
        alike = [each for each in problems if each.workload == workload]
        values: dict[str, set[Any]] = defaultdict(set)
        for each in alike:
            for name, value in each.key:
                values[name].add(value)
        for each in alike:
            told = [
                f"{column_label(name)}={value}"
                for name, value in each.key
                if name in ("tokens", "tp_size") or len(values[name]) > 1
            ]
            each.name = " ".join(told)
