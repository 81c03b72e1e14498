"""The whole HTML report: verdicts first, then each workload's answer and picture, with everything else folded."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from tpbench import packages
from tpbench.report.analysis.grid import RecordGrid, arrange_rows, heading
from tpbench.report.analysis.metrics import (
    CLOCKS,
    INTERLEAVED_METHOD,
    METHOD,
    METRICS,
    OUTLIER,
    TITLES,
    WALL,
    ClockColumns,
    counted,
    metric,
)
from tpbench.report.analysis.records import Record
from tpbench.report.analysis.verdicts import (
    DOUBTS,
    GOOD,
    ProblemVerdict,
    answer,
    disagreements,
    group_names,
    mixing_note,
    shared_facts,
    verdict_columns,
    verdicts,
)
from tpbench.report.page import page_tables
from tpbench.report.page.template import render_page
from tpbench.report.pivot import failures, legend, metric_table
from tpbench.report.plots import PLOTS, inline_picture, style, timeline
from tpbench.report.plots.by_size import has_sizes
from tpbench.results.schema import STATUSES, workload_columns
from tpbench.tables import Table
from tpbench.workloads import workloads

_COLUMNS = (
    *METRICS, *page_tables.MACHINE_FACTS, *verdict_columns(), *timeline.COLUMNS, "started_at", "finished_at", "log_dir",
    "time_ci_low_ms", "time_ci_high_ms", "device_ci_low_ms", "device_ci_high_ms",
)  # fmt: skip
_PICTURES = ("block_cap", "timeline")
"""Plots of a section, after that of its leading clock."""


@dataclass(frozen=True)
class PageFigure:
    """A picture."""

    caption: str
    svg: str
    """An `svg` element."""


@dataclass(frozen=True)
class StudySection:
    """One study of a section."""

    name: str
    question: str
    table: Table


@dataclass(frozen=True)
class PageSection:
    """Everything that the page shows of one grid, folded."""

    anchor: str
    heading: str
    size: str
    """How many problems and columns it has."""
    mixing: str
    """A sentence about hosts and versions that its rows mix, or nothing."""
    pivots: list[tuple[str, Table]]
    """Tables of metrics with their captions, the leading one first."""
    figures: list[PageFigure]
    speedups: Table
    distributions: Table
    failures: Table
    studies: list[StudySection]
    every_cell: Table


@dataclass(frozen=True)
class WorkloadPart:
    """The answer of one workload, its picture, and its sections."""

    name: str
    anchor: str
    summary: str
    answer: str
    figure: PageFigure | None
    figure_of: str
    """The grid that the picture shows, if the workload has several."""
    sections: list[PageSection]


def page(frame: pd.DataFrame, metric_name: str | None = None, *, all_rows: bool = False) -> str:
    """Return one self-contained HTML page about the newest row of each cell of `frame`, or about every row.

    The tables of each section start with the metric of that name. By default they start with the device time, and with
    the wall time where no row has a device time.
    """
    if metric_name is not None:
        metric(metric_name)
    own = {name for columns in workload_columns().values() for name in columns}
    arranged = arrange_rows(frame, [*_COLUMNS, *own], all_rows=all_rows)
    shown = metric(metric_name or "time_ms")
    warnings = disagreements(arranged.records)
    disputed = frozenset[str]().union(*warnings.values())
    found = [verdicts(grid, disputed) for grid in arranged.grids]
    sections = zip(arranged.grids, found, itertools.count(), strict=False)
    parts = [
        _part(name, list(group), metric_name)
        for name, group in itertools.groupby(sections, key=lambda each: each[0].workload)
    ]
    of_all = [verdict for of_grid in found for verdict in of_grid]
    failed = sum(map(len, failures(arranged).values()))
    return render_page(
        "report.html.j2",
        title="tpbench report",
        summary=_summary(arranged.records, len(frame)),
        measured_on=page_tables.machines_line(arranged.records, heading(_bare(shared_facts(arranged.grids)))),
        warnings=list(warnings),
        failures=page_tables.failure_groups(arranged),
        failed=f"{counted(failed, 'cell')} without a result",
        verdicts=page_tables.verdict_groups(of_all),
        every_verdict=page_tables.every_verdict(of_all),
        problems=len(of_all),
        side_by_side=page_tables.machines_side_by_side(of_all),
        parts=parts,
        good=GOOD,
        doubts=DOUBTS,
        notes=[*_notes(metric_name), *legend([metric_table(grid, shown) for grid in arranged.grids], shown)],
        machines=page_tables.machines(arranged.records),
    )


def _bare(facts: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in facts.items() if name not in ("workload", "hardware", "device")}


def _summary(records: tuple[Record, ...], rows: int) -> str:
    count = Counter(str(record["status"]) for record in records)
    known = (*STATUSES, *(set(count) - set(STATUSES)))
    by_status = ", ".join(f"{count[status]} {status}" for status in known if count[status])
    times = sorted(record["finished_at"] for record in records if record["finished_at"] is not None)
    when = f" Measured {page_tables.period(times[0], times[-1])}." if times else ""
    older = f" ({rows - len(records)} older rows of the same cells are left out)" if rows > len(records) else ""
    return f"{len(records)} cells: {by_status}{older}.{when}"


def _part(
    name: str, group: Sequence[tuple[RecordGrid, list[ProblemVerdict], int]], metric_name: str | None
) -> WorkloadPart:
    workload = workloads().get(name)
    grids = [grid for grid, _, _ in group]
    names = group_names(grids)
    of_all = [each for _, of_grid, _ in group for each in of_grid]
    figure, shown = _lead_figure(name, [grid.problems for grid in grids])
    return WorkloadPart(
        name=name,
        anchor=f"workload-{re.sub('[^A-Za-z0-9]+', '-', name)}",
        summary=workload.summary if workload else "",
        answer=answer(of_all),
        figure=figure,
        figure_of="" if shown is None else names[shown],
        sections=[
            _section(grid, f"s{at}", text or "Tables and pictures", metric_name)
            for (grid, _, at), text in zip(group, names, strict=True)
        ],
    )


def _lead_figure(workload: str, grids: Sequence[RecordGrid]) -> tuple[PageFigure | None, int | None]:
    """Return the one picture of a workload, and the index of its grid: that with most cells that has a picture.

    It shows times by size, or speed-ups if no problem was measured at two sizes.
    """
    ordered = sorted(enumerate(grids), key=lambda each: -sum(1 for _ in each[1].cells()))
    for at, grid in (*((at, grid) for at, grid in ordered if has_sizes(grid)), *ordered):
        wall = _clock(grid) is WALL
        plot = ("time" if wall else "device_time") if has_sizes(grid) else "speedup" if wall else "device_speedup"
        if figure := _figure(grid, plot, f"{workload} {at}"):
            return figure, at
    return None, None


def _figure(grid: RecordGrid, plot: str, anchor: str) -> PageFigure | None:
    svg = inline_picture(grid, plot, anchor) if style.available() else None
    return None if svg is None else PageFigure(PLOTS[plot].title, svg)


def _clock(grid: RecordGrid) -> ClockColumns:
    """Return the leading clock: device time where rows have it."""
    timed = (clock for clock in CLOCKS if any(cell.record[clock.time_column] is not None for cell in grid.cells()))
    return next(timed, WALL)


def _section(grid: RecordGrid, anchor: str, name: str, metric_name: str | None) -> PageSection:
    lead = metric_name or _clock(grid).time_column
    shown = [metric(lead), *page_tables.metrics_with_values(grid, [each for each in TITLES if each != lead])]
    by_time = "time" if _clock(grid) is WALL else "device_time"
    drawn = [*([by_time] if has_sizes(grid.problems) else []), *_PICTURES]
    figures = [_figure(grid.problems, plot, anchor) for plot in drawn]
    return PageSection(
        anchor=anchor,
        heading=name,
        size=f"{counted(len(grid.rows), 'problem')}, {counted(len(grid.columns), 'variant')} with options",
        mixing=mixing_note(grid, "This section"),
        pivots=[(_caption(each.name), page_tables.pivot_table(grid, each)) for each in shown],
        figures=[figure for figure in figures if figure],
        speedups=page_tables.speedup_table(grid),
        distributions=page_tables.distribution_table(grid),
        failures=page_tables.failure_table(grid),
        studies=list(_studies(grid)),
        every_cell=page_tables.complete_table(grid),
    )


def _caption(name: str) -> str:
    return f"{TITLES[name]} ({name})" if name in TITLES else name


def _studies(grid: RecordGrid) -> Iterable[StudySection]:
    """Return the column studies of a grid. A study of an option is left out unless the option varies."""
    workload = workloads().get(grid.workload)
    for name, study in workload.studies.items() if workload else ():
        varies = not study.option or len({cell.record[study.option] for cell in grid.cells()} - {None}) > 1
        if study.columns and varies:
            yield StudySection(name, study.question, page_tables.study_table(grid, name, study))


def _notes(metric_name: str | None) -> list[str]:
    """Return each method once."""
    shown = dict.fromkeys((*TITLES, *([metric_name] if metric_name else [])))
    missing = () if style.available() else (f"pictures need matplotlib: {packages.install_command('report')}",)
    return [
        *missing,
        "time: device time where rows have it, else wall time. Device time is measured by events on the GPU with "
        "launches queued ahead; wall time also contains what Python and the launches take",
        "floor: the time that the unavoidable bytes take at the copy bandwidth measured on the same machine",
        "runner-up: the fastest other variant, and how many times as long it takes. (2.00x) in tables: twice the "
        "fastest of its line",
        *(f"{each.name}: {each.doc}" for each in map(metric, shown)),
        f"trust: {GOOD}, or: {'; '.join(f'{name}: {meaning}' for name, meaning in DOUBTS.items())}",
        f"intervals of medians: order statistics; of speed-ups: {METHOD}. Or, {INTERLEAVED_METHOD}",
        f"distributions: {OUTLIER}",
        *(f"{status}: {meaning}" for status, meaning in STATUSES.items()),
    ]
