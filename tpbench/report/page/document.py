"""The whole HTML report: a summary, then each grid with its tables, plots and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from tpbench import packages
from tpbench.report import interleaved, plots, ratio
from tpbench.report.grids import RecordGrid, arrange_rows
from tpbench.report.metric import METRICS, metric
from tpbench.report.page import tables
from tpbench.report.page.cells import PageTable
from tpbench.report.page.machines import FACTS, machines
from tpbench.report.page.template import render_page
from tpbench.report.pivot import tabulate
from tpbench.report.plots import style
from tpbench.report.records import Record
from tpbench.report.samples import OUTLIER
from tpbench.results.schema import STATUSES, workload_columns
from tpbench.workloads import workloads

_FURTHER_METRICS = ("time_ms", "device_ms", "fraction_of_floor", "gb_per_s", "peak_gib")
_COLUMNS = (
    *plots.COLUMNS, *METRICS, *FACTS, "started_at", "finished_at", "log_dir",
    "time_ci_low_ms", "time_ci_high_ms", "device_ci_low_ms", "device_ci_high_ms",
)  # fmt: skip


@dataclass(frozen=True)
class PageFigure:
    """A plot as an `svg` element, and its caption, which screen readers read out."""

    svg: str
    caption: str


@dataclass(frozen=True)
class StudySection:
    """One study of a section."""

    name: str
    question: str
    table: PageTable


@dataclass(frozen=True)
class PageSection:
    """Everything that the page shows of one grid."""

    anchor: str
    heading: str
    workload: str
    workload_summary: str
    caption: str
    """Name and meaning of the pivot's metric."""
    pivot: PageTable
    further_pivots: list[tuple[str, PageTable]]
    """Tables of further metrics with their captions."""
    figures: dict[str, list[PageFigure]]
    """Plots by chapter."""
    speedups: PageTable
    distributions: PageTable
    failures: PageTable
    studies: list[StudySection]
    every_cell: PageTable


def page(frame: pd.DataFrame, metric_name: str = "time_ms", *, all_rows: bool = False) -> str:
    """Return one self-contained HTML page about the newest row of each cell of `frame`, or about every row."""
    metric(metric_name)
    own = {name for columns in workload_columns().values() for name in columns}
    arranged = arrange_rows(frame, [*_COLUMNS, *own], all_rows=all_rows)
    report = tabulate(arranged, metric_name)
    return render_page(
        "report.html.j2",
        title="tpbench report",
        summary=_summary(arranged.records, len(frame)),
        warnings=report.warnings,
        with_plots=style.available(),
        install_plots=packages.install_command("report"),
        sections=[_section(grid, metric_name, f"s{at}") for at, grid in enumerate(arranged.grids)],
        speedup_method=f"{ratio.METHOD}. Or, {interleaved.METHOD}.",
        samples_legend=f"Bars: quartiles; lines: 5th to 95th percentile; {OUTLIER}.",
        notes=[report.caption, *report.legend, *_notes()],
        machines=machines(arranged.records),
    )


def _summary(records: tuple[Record, ...], found: int) -> str:
    count = Counter(str(record["status"]) for record in records)
    known = (*STATUSES, *(set(count) - set(STATUSES)))
    by_status = ", ".join(f"{count[status]} {status}" for status in known if count[status])
    times = sorted(record["finished_at"] for record in records if record["finished_at"] is not None)
    when = f" Measured {times[0]:%Y-%m-%d} to {times[-1]:%Y-%m-%d}." if times else ""
    older = f" ({found - len(records)} older rows of the same cells are left out)" if found > len(records) else ""
    return f"{len(records)} cells: {by_status}{older}.{when}"


def _section(grid: RecordGrid, metric_name: str, anchor: str) -> PageSection:
    workload = workloads().get(grid.workload)
    shown = metric(metric_name)
    further = tables.metrics_with_values(grid, [name for name in _FURTHER_METRICS if name != metric_name])
    return PageSection(
        anchor=anchor,
        heading=grid.heading,
        workload=grid.workload,
        workload_summary=workload.summary if workload else "",
        caption=f"{shown.name}: {shown.doc}",
        pivot=tables.pivot_table(grid, shown),
        further_pivots=[(f"{other.name}: {other.doc}", tables.pivot_table(grid, other)) for other in further],
        figures=_figures(grid, anchor) if style.available() else {},
        speedups=tables.speedup_table(grid),
        distributions=tables.distribution_table(grid),
        failures=tables.failure_table(grid),
        studies=list(_studies(grid)),
        every_cell=tables.complete_table(grid),
    )


def _figures(grid: RecordGrid, anchor: str) -> dict[str, list[PageFigure]]:
    chapters: dict[str, list[PageFigure]] = {}
    for name, plot in plots.PLOTS.items():
        svg = plots.inline_svg(grid, name, f"{anchor}{name}")
        if svg is not None:
            chapters.setdefault(plot.chapter, []).append(PageFigure(svg, plot.title))
    return chapters


def _studies(grid: RecordGrid) -> Iterable[StudySection]:
    """Return the column studies of a grid. A study of an option is left out unless the option varies."""
    workload = workloads().get(grid.workload)
    for name, study in workload.studies.items() if workload else ():
        varies = not study.option or len({cell.record[study.option] for cell in grid.cells()} - {None}) > 1
        if study.columns and varies:
            yield StudySection(name, study.question, tables.study_table(grid, name, study))


def _notes() -> list[str]:
    return [
        "floor: the time that the unavoidable bytes take at the copy bandwidth measured on the same machine",
        f"intervals of medians: order statistics; of speed-ups: {ratio.METHOD}",
        *(f"{status}: {meaning}" for status, meaning in STATUSES.items()),
    ]
