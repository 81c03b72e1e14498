"""A workload's study: a line for each cell, and several of its numbers side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpbench.fields import JobError, unknown
from tpbench.report.layout import Layout, Section
from tpbench.report.metric import number
from tpbench.report.pivot import mark
from tpbench.report.records import Record, label, say
from tpbench.report.table import MARKS
from tpbench.workloads import Study, workloads

SHARES = ("fraction_of_floor", "occupancy")
"""Columns that are written as percentages."""


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
    return tuple(dict.fromkeys(each for study in studies()[name].values() for each in study.shows))


def sheets(layout: Layout, name: str) -> tuple[Sheet, ...]:
    """The study of the rows in their places. Raises JobError where they are of other workloads."""
    by_workload = studies()[name]
    found = [sheet(each, by_workload[each.workload]) for each in layout.sections if each.workload in by_workload]
    if not found:
        raise JobError(f"no rows for the study {name}, which is of {', '.join(by_workload)}")
    return tuple(found)


def sheet(section: Section, study: Study) -> Sheet:
    """One section's."""
    shown = shown_columns(section, study)
    lines = [
        (*map(say, key), head, f"{say(record['status'])}{_mark(record)}", *(write(each, record) for each in shown))
        for key, head, record in cells(section)
    ]
    return Sheet(section.facts, (*map(label, section.names), "variant", "status", *shown), tuple(lines))


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
    return tuple(name for name in study.shows if any(record.get(name) is not None for record in found))


def write(name: str, record: Record) -> str:
    """One number of a record as people read it; its unit ends its name."""
    value = record.get(name)
    if isinstance(value, float):
        return f"{100 * value:.1f}%" if name in SHARES else number(value)
    return say(value)


def _mark(record: Record) -> str:
    return mark(record) if record["status"] == "ok" else ""
