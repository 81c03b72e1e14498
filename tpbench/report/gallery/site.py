"""The files of the gallery's site: one page that compares the machines, and a report for each entry."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpbench.report.conclusions.verdicts import Verdict
from tpbench.report.gallery.entry import Entry
from tpbench.report.gallery.winners import Machine, Problem, headlines, measured_problems
from tpbench.report.grids.records import value_text
from tpbench.report.numbers.clocks import DEVICE
from tpbench.report.numbers.metric import counted, ratio_text
from tpbench.report.page.cells import MISSING_CELL, PageCell, PageTable, quantity, words
from tpbench.report.page.html_page import page
from tpbench.report.page.machines import period
from tpbench.report.page.template import render_page
from tpbench.settings import JobError

INDEX = "index.html"


@dataclass(frozen=True)
class EntryPart:
    """One entry on the site's first page."""

    entry: Entry
    rows: str
    refused: PageTable
    warnings: str
    """How many warnings there are."""


def write_site(entries: Sequence[Entry], folder: Path) -> list[Path]:
    """Write the site into a folder, and return its files. Raises JobError for two entries of one title."""
    pages = Counter(each.page for each in entries)
    if twice := [each.title for each in entries if pages[each.page] > 1]:
        raise JobError(f"two entries have the title {twice[0]} or one like it: change the title in one gallery.yaml")
    if INDEX in pages:
        raise JobError("no entry can have the title index")
    written: Mapping[str, str] = {INDEX: index(entries)} | {each.page: page(each.frame) for each in entries}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in written]


def index(entries: Sequence[Entry]) -> str:
    """Return the first page: the fastest variant of each problem on each machine."""
    machines, problems = measured_problems(entries)
    chosen = headlines(problems)
    everywhere = [
        (workload, _table(f"problems of {workload}", machines, list(group)))
        for workload, group in itertools.groupby(problems, key=lambda each: each.workload)
    ]
    rows = sum(len(each.frame) for each in entries)
    return render_page(
        "gallery.html.j2",
        title="tpbench gallery",
        summary=f"{counted(len(machines), 'machine')}, {counted(len(problems), 'problem')}, {counted(rows, 'row')}",
        first=_table("fastest", machines, chosen, with_workload=True),
        everywhere=everywhere,
        parts=[_part(each) for each in entries],
    )


def _table(
    name: str, machines: Sequence[Machine], problems: Sequence[Problem], with_workload: bool = False
) -> PageTable:
    rows = []
    for each in problems:
        cells = [_cell(each.by_machine.get(at)) for at in range(len(machines))]
        rows.append([*([words(each.workload)] if with_workload else []), words(each.name, 300), *cells])
    heads = [*(["workload"] if with_workload else []), "problem"]
    return PageTable(name, [*heads, *(each.name for each in machines)], rows, digits="none", keys=len(heads))


def _cell(verdict: Verdict | None) -> PageCell:
    """Return the fastest variant with its time, and in a second line the next variant with its ratio."""
    if verdict is None or verdict.fastest is None:
        return MISSING_CELL
    second = verdict.runner_up
    behind = f"{ratio_text(verdict.ratio.value)} {second.column}" if second and verdict.ratio else ""
    time = quantity(verdict.time_ms, "ms").text
    clock = "" if verdict.clock is DEVICE else f" {verdict.clock.name}"
    return PageCell(f"{verdict.fastest.column} {time}{clock}", verdict.time_ms, "first", detail=behind)


def _part(entry: Entry) -> EntryPart:
    times = sorted(entry.frame["finished_at"].dropna())
    when = f", measured {period(times[0], times[-1])}" if times else ""
    refused = [[words(each.row_id), words(each.variant), words(each.reason, 400)] for each in entry.refused]
    hardware = sorted({value_text(name) for name in entry.frame["gpu_name"].dropna()})
    return EntryPart(
        entry,
        f"{counted(len(entry.frame), 'row')}{when}{', ' + ', '.join(hardware) if hardware else ''}",
        PageTable("refused rows", ["row", "variant", "reason"], refused, digits="none"),
        counted(len(entry.faults), "warning"),
    )
