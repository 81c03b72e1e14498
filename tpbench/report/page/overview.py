"""The first screen of a page: verdicts, machines, failures and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpbench.report.conclusions.answers import group_names
from tpbench.report.conclusions.verdicts import GOOD, Verdict, selected
from tpbench.report.numbers.clocks import DEVICE, WALL
from tpbench.report.numbers.metric import number, ratio_text
from tpbench.report.page.cells import MISSING_CELL, PageCell, PageTable, percentage, quantity, words
from tpbench.report.page.chart import marker_svg
from tpbench.report.page.column_styles import Looks
from tpbench.report.tables.pivot_report import FailureGroup

_COLUMNS = ("fastest", "device time", "wall time", "runner-up", "of floor", "memory", "trust")
NO_MEMORY_GIB = 0.001
"""Memory below this is shown as such: no digit of it matters."""


@dataclass(frozen=True)
class VerdictLine:
    """One line of the first table."""

    key: str
    """The marker of the fastest column as an `svg` element."""
    cells: Sequence[PageCell]
    """The problem, then `_COLUMNS` without the last."""
    trust: Sequence[str]
    """`GOOD`, or names of doubts."""


@dataclass(frozen=True)
class VerdictGroup:
    """The lines of one grid."""

    heading: str
    anchor: str
    lines: Sequence[VerdictLine]


@dataclass(frozen=True)
class Verdicts:
    """The first table, and the table of all problems if the first has only some."""

    columns: Sequence[str]
    groups: Sequence[VerdictGroup]
    every: PageTable | None
    count: int
    """Number of problems."""


def verdict_tables(verdicts: Sequence[Verdict], looks: Looks) -> Verdicts:
    """Return the tables of verdicts of all grids, in the order of the grids."""
    grids = list({id(each.grid): each.grid for each in verdicts}.values())
    names = dict(zip(map(id, grids), group_names(grids), strict=True))
    shown = selected(verdicts)
    groups = []
    for at, grid in enumerate(grids):
        lines = [_line(each, looks) for each in shown if each.grid is grid]
        if lines:
            groups.append(VerdictGroup(names[id(grid)] or grid.workload, f"s{at}", lines))
    every = None
    if len(shown) < len(verdicts):
        rows = [[words(names[id(each.grid)]), *_cells(each), _trust_cell(each)] for each in verdicts]
        every = PageTable("verdicts of all problems", ["group", "problem", *_COLUMNS], rows, digits="none")
    return Verdicts(("problem", *_COLUMNS), groups, every, len(verdicts))


def _line(verdict: Verdict, looks: Looks) -> VerdictLine:
    fastest = verdict.fastest
    key = marker_svg(looks[verdict.grid.workload, fastest.column]) if fastest else ""
    return VerdictLine(key, _cells(verdict), verdict.doubts or (GOOD,))


def _trust_cell(verdict: Verdict) -> PageCell:
    return words(", ".join(verdict.doubts) or GOOD)


def _cells(verdict: Verdict) -> list[PageCell]:
    """Return the cells of a verdict without its trust mark."""
    fastest = verdict.fastest
    if fastest is None:
        return [words(verdict.problem), *[MISSING_CELL] * (len(_COLUMNS) - 1)]
    record, second = fastest.record, verdict.runner_up
    behind = MISSING_CELL
    if second and verdict.ratio:
        behind = PageCell(f"{ratio_text(verdict.ratio.value)} {second.column}", verdict.ratio.value)
    return [
        words(verdict.problem), words(fastest.column),
        quantity(record["device_ms"], "ms", "best" if verdict.clock is DEVICE else ""),
        quantity(record["time_ms"], "ms", "best" if verdict.clock is WALL else ""),
        behind, _share(record["fraction_of_floor"]), _memory(record["peak_gib"]),
    ]  # fmt: skip


def _share(value: float | None) -> PageCell:
    return percentage(value) if value is None else PageCell(f"{100 * value:.0f}%", float(value))


def _memory(value: float | None) -> PageCell:
    if value is None or value >= NO_MEMORY_GIB:
        return quantity(value, "GiB")
    return PageCell(f"<{number(NO_MEMORY_GIB)} GiB", float(value))


def failure_groups(groups: Sequence[FailureGroup]) -> PageTable:
    """Return the failed cells of all grids, merged by status and reason."""
    rows = [
        [words(len(each.cells)), PageCell(each.status, None, "bad" if each.status != "skipped" else "dim"),
         words(each.reason or "no reason given", 600), words("; ".join(each.cells), 600)]
        for each in groups
    ]  # fmt: skip
    return PageTable("failures", ["cells", "status", "reason", "which"], rows, digits="none")
