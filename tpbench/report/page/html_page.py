"""The whole HTML report: verdicts first, then each workload's answer and picture, with everything else folded."""

import base64
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

import pandas as pd

from tpbench import packages
from tpbench.measure.clocks import CHAINED, DECIDING, WALL
from tpbench.report import plots
from tpbench.report.analysis import verdicts
from tpbench.report.analysis.comparison import INTERLEAVED_METHOD, METHOD, value_of
from tpbench.report.analysis.grid import RecordGrid, arrange_rows, heading
from tpbench.report.analysis.metrics import TITLES, counted, metric, number, ratio_text
from tpbench.report.analysis.records import Record, hover_text, value_text
from tpbench.report.pivot import FAILED, failures, legend, metric_table
from tpbench.results.schema import STATUSES
from tpbench.settings import JobError
from tpbench.suggestions import printable
from tpbench.tables import Table, TableCell
from tpbench.workloads import workloads

MACHINE_FACTS = (
    "gpu_name", "gpu_count", "nodes", "driver_version", "cuda_version", "nccl_version", "torch_version",
    "triton_version", "backend", "python_version", "os", "cpu_model", "cpu_count", "tpbench_version", "kernels_version",
    "git_commit", "git_dirty", "host",
)  # fmt: skip
"""Columns of rows that describe the machine and its software."""
GLYPHS = "●■▲◆▼✚◀"
"""The markers of pictures, as letters of a legend."""


def page(frame: pd.DataFrame, metric_name: str | None = None) -> str:
    """Return one self-contained HTML page about the newest row of each cell of `frame`.

    The tables of each section start with the metric of that name. By default they start with the device time, and with
    the wall time where no row has a device time. The page's policy permits no script but its own, and no network.
    """
    try:
        import jinja2
    except ModuleNotFoundError:
        raise JobError(f"the HTML report needs jinja2: {packages.pip_install('jinja2')}") from None
    grids = arrange_rows(frame)
    records = [record for grid in grids for record in grid.records]
    warnings = verdicts.disagreements(records)
    disputed = frozenset[str]().union(*warnings.values())
    judged = [(f"s{at}", grid, verdicts.verdicts_of(grid, disputed)) for at, grid in enumerate(grids)]
    failed = failures(grids)
    hosts = sorted({value_text(record["host"]) for record in records if record["host"]})
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tpbench.report", "page"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"number": number, "ratio": ratio_text, "hover": hover_text}
    css, script = (
        (resources.files(__package__) / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    return environment.get_template("report.html.j2").render(
        css=css,
        script=script,
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        light=plots.LIGHT,
        dark=plots.DARK,
        summary=_summary(records, len(frame)),
        measured_on=f"{'/'.join(dict.fromkeys(value_text(record['hardware']) for record in records))}"
        f"{'; hosts: ' + ', '.join(hosts) if hosts else ''}.",
        warnings=list(warnings),
        failures=_failures(failed),
        failed=f"{counted(sum(map(len, failed.values())), 'cell')} without a result",
        unfolded=sum(len(of_grid) for _, _, of_grid in judged) <= 20,
        parts=[
            _part(name, [*sections], metric_name)
            for name, sections in itertools.groupby(judged, key=lambda section: section[1].workload)
        ],
        no_pictures=""
        if packages.installed("matplotlib")
        else f"Pictures need matplotlib: {packages.install_command('report')}",
        good=verdicts.GOOD,
        doubts=verdicts.DOUBTS,
        metrics=list(map(metric, dict.fromkeys((*TITLES, *filter(None, [metric_name]))))),
        statuses=STATUSES,
        methods=(METHOD, INTERLEAVED_METHOD),
        machines=_machines(records),
    )


def _summary(records: Sequence[Record], rows: int) -> str:
    count = Counter(value_text(record["status"]) for record in records)
    by_status = ", ".join(f"{count[status]} {status}" for status in dict.fromkeys((*STATUSES, *count)) if count[status])
    days = sorted({f"{record['finished_at']:%Y-%m-%d}" for record in records if record["finished_at"] is not None})
    when = f" Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}." if days else ""
    older = f" ({rows - len(records)} older rows of the same cells are left out)" if rows > len(records) else ""
    return f"{len(records)} cells: {by_status}{older}.{when}"


def _part(name: str, judged: Sequence[tuple[str, RecordGrid, Any]], metric_name: str | None) -> dict[str, Any]:
    """Return what the page shows of one workload, by names in the template: its answer, its picture, its sections."""
    workload = workloads().get(name)
    shared = set.intersection(*(set(grid.facts.items()) for _, grid, _ in judged))
    return {
        "name": name,
        "anchor": f"workload-{re.sub('[^A-Za-z0-9]+', '-', name)}",
        "summary": workload.summary if workload else "",
        "answers": verdicts.answers([verdict for *_, of_grid in judged for verdict in of_grid]),
        "sections": [
            {
                "anchor": anchor,
                "heading": heading(dict(item for item in grid.facts.items() if item not in shared)) or "All problems",
                "answer": verdicts.answer(of_grid),
                "verdicts": of_grid,
                "size": f"{counted(len(grid.lines), 'problem')}, {counted(len(grid.columns), 'variant')} with options",
                "legend": [
                    (at % len(plots.LIGHT), GLYPHS[at % len(GLYPHS)], column) for at, column in enumerate(grid.columns)
                ],
                **_tables_and_figures(anchor, grid, metric_name),
            }
            for anchor, grid, of_grid in judged
        ],
    }


def _tables_and_figures(anchor: str, grid: RecordGrid, metric_name: str | None) -> dict[str, Any]:
    filled = [name for name in TITLES if any(record[name] is not None for record in grid.records)]
    clock = next((clock.column for clock in DECIDING if clock.column in filled), WALL.column)
    tables: list[tuple[str, Table]] = []
    for shown in map(metric, dict.fromkeys((metric_name or clock, *filled))):
        table = metric_table(grid, shown)
        notes = [*table.notes, *legend([table], shown)]
        if not tables:  # the first table of a section is the place of its rows
            lines = zip(table.cells, grid.lines.values(), strict=True)
            table = replace(table, rows=[_with_rows(cells, line) for cells, line in lines])
        title = f"{TITLES[shown.name]} ({shown.name})" if shown.name in TITLES else shown.name
        tables.append((title, replace(table, notes=notes)))
    drawn = [name for name in dict.fromkeys((clock, CHAINED.column)) if name in filled]
    return {"tables": tables, "figures": [_figure(grid, name, anchor) for name in drawn]}


def _with_rows(cells: Sequence[TableCell], line: Sequence[Record | None]) -> list[TableCell]:
    """Return the cells of a table's line with what the mouse shows of their rows, and with anchors of the rows."""
    keys = len(cells) - len(line)
    return [*cells[:keys]] + [
        replace(cell, hover=hover_text(record), anchor=value_text(record["row_id"])) if record else cell
        for cell, record in zip(cells[keys:], line, strict=True)
    ]


def _figure(grid: RecordGrid, name: str, anchor: str) -> dict[str, Any]:
    """Return the pictures of a metric: a panel for each world size, or bars of each problem without a second size."""
    shown = metric(name)
    figure = {"title": TITLES[name], "metric": shown, "panels": [], "bars": []}
    if packages.installed("matplotlib") and (picture := plots.by_size(grid, name, for_page=True)):
        panels = [
            plots.render(replace(picture, panels=(panel,)), f"{name} {anchor} {at}", inline=True)
            for at, panel in enumerate(picture.panels)
        ]
        return figure | {"title": f"{TITLES[name]} by size, with its floor", "panels": panels}
    for key, line in grid.lines.items():
        values = [
            (at, record, value) for at, record in enumerate(line) if record and (value := value_of(record, shown))
        ]
        figure["bars"] += [(grid.problem_text(key, grid.varying), values)] if values else []  # type: ignore[operator]
    return figure


def _failures(failed: Mapping[tuple[str, str], Sequence[str]]) -> Table:
    """Return the failed cells of all grids, merged by status and reason."""
    rows: list[list[TableCell | str]] = [
        [str(len(cells)), TableCell(status, kind=FAILED.get(status, "")), reason or "no reason given",
         printable("; ".join(cells), 600)]
        for (status, reason), cells in failed.items()
    ]  # fmt: skip
    return Table("failures", ["cells", "status", "reason", "which"], rows)


def _machines(records: Sequence[Record]) -> Table:
    """Return the columns about machines and software, each with its values and their numbers of rows."""
    rows = []
    for name in MACHINE_FACTS:
        values = [record[name] for record in records if record[name] is not None]
        counts = Counter(value_text(str(value)[:8] if name == "git_commit" else value) for value in values)
        if counts:
            rows.append([name, ", ".join(f"{text} ({count})" for text, count in counts.most_common())])
    return Table("what it ran on", ("column", "values (rows)"), rows)
