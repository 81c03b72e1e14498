"""A workload's study: a line for each cell, and several of its numbers side by side."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from tpbench.report.layout import Layout, Section
from tpbench.report.metric import metric, number, times
from tpbench.report.pivot import mark
from tpbench.report.records import Record, label, say
from tpbench.report.table import MARKS
from tpbench.settings import JobError, unknown
from tpbench.workloads import Study, workloads

OF_BEST = "of best"
"""Head of the column that says how a cell stands to the best."""


@dataclass(frozen=True)
class Sheet:
    """One section's study. All text in it is harmless to print."""

    facts: Mapping[str, str]
    heads: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """The meaning of the marks that occur beside a status."""
        statuses = {line[self.heads.index("status")] for line in self.lines}
        return tuple(f"{sign} {meaning}" for sign, meaning in MARKS.items() if f"ok{sign}" in statuses)


@functools.cache
def shares() -> frozenset[str]:
    """Columns that are written as percentages."""
    return frozenset({"fraction_of_floor"}.union(*(each.percentages for each in workloads().values())))


def studies() -> dict[str, dict[str, Study]]:
    """Every study by name, for each workload that has it."""
    found: dict[str, dict[str, Study]] = {}
    for workload in workloads().values():
        for name, each in workload.studies.items():
            found.setdefault(name, {})[workload.name] = each
    return found


def columns(name: str) -> tuple[str, ...]:
    """What records need for the study of that name. Raises JobError that lists the valid ones."""
    if name not in studies():
        raise JobError(unknown("study", name, studies()))
    return tuple(dict.fromkeys(each for study in studies()[name].values() for each in (*study.columns, *study.best_by)))


def sheets(layout: Layout, name: str) -> tuple[Sheet, ...]:
    """The study of the rows in their places. Raises JobError where they are of other workloads."""
    by_workload = studies()[name]
    found = [sheet(each, by_workload[each.workload]) for each in layout.sections if each.workload in by_workload]
    if not found:
        raise JobError(f"no rows for the study {name}, which is of {', '.join(by_workload)}")
    return tuple(found)


def sheet(section: Section, study: Study) -> Sheet:
    """One section's."""
    shown, stands = shown_columns(section, study), standings(section, study)
    lines = []
    for at, (key, head, record) in enumerate(cells(section)):
        numbers = [write(each, record) for each in shown]
        status = f"{say(record['status'])}{_mark(record)}"
        lines.append((*map(say, key), head, status, *([stands[at]] if stands else ()), *numbers))
    heads = (*map(label, section.names), "variant", "status", *([OF_BEST] if stands else ()), *shown)
    return Sheet(section.facts, heads, tuple(lines))


def standings(section: Section, study: Study) -> list[str]:
    """For each cell how many times worse it is than the best it compares with; nothing where the study has no such
    column. Only right and measured cells compare."""
    found = cells(section)
    name = next((each for each in study.best_by if any(record.get(each) is not None for _, _, record in found)), None)
    if name is None:
        return []
    contests: dict[tuple[object, ...], list[int]] = {}
    for at, (key, _, record) in enumerate(found):
        if record["status"] == "ok" and not mark(record) and record.get(name) is not None:
            pairs = zip(section.names, key, strict=True)
            contests.setdefault(tuple(value for each, value in pairs if each not in study.compared_across), []).append(
                at
            )
    stands = ["-"] * len(found)
    for places in contests.values():
        ratios = metric(name).ratios([float(found[at][2][name]) for at in places])
        for at, ratio in zip(places, ratios, strict=True):
            stands[at] = "-" if ratio is None else times(ratio)
    return stands


def cells(section: Section) -> list[tuple[tuple[object, ...], str, Record]]:
    """A section's records with their keys and the heads of their columns, problem by problem."""
    return [
        (row.key, head, record)
        for row in section.rows
        for head, record in zip(section.heads, row.records, strict=True)
        if record
    ]


def shown_columns(section: Section, study: Study) -> tuple[str, ...]:
    """The study's columns that some record has."""
    found = [record for _, _, record in cells(section)]
    return tuple(name for name in study.columns if any(record.get(name) is not None for record in found))


def write(name: str, record: Record) -> str:
    """One number of a record as people read it; its unit ends its name."""
    value = record.get(name)
    if isinstance(value, float):
        return f"{100 * value:.1f}%" if name in shares() else number(value)
    return say(value)


def _mark(record: Record) -> str:
    return mark(record) if record["status"] == "ok" else ""
