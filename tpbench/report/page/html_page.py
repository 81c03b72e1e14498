"""The whole HTML report: verdicts first, then each workload's answer and picture, with everything else folded."""

import base64
import hashlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any, NamedTuple

import pandas as pd

from tpbench import packages
from tpbench.measure.clocks import CHAINED, DECIDING, DEVICE, WALL
from tpbench.report import plots
from tpbench.report.analysis.comparison import INTERLEAVED_METHOD, METHOD, value_of
from tpbench.report.analysis.grid import RecordGrid, arrange_rows, heading
from tpbench.report.analysis.metrics import TITLES, counted, metric, number, ratio_text
from tpbench.report.analysis.records import Record, hover_text, value_text
from tpbench.report.analysis.verdicts import (
    DOUBTS,
    GOOD,
    ProblemVerdict,
    answer,
    answers,
    disagreements,
    name_of_problem,
    verdicts_of,
)
from tpbench.report.pivot import FAILED, failures, legend, metric_table
from tpbench.results.schema import STATUSES
from tpbench.settings import JobError
from tpbench.suggestions import printable
from tpbench.tables import MISSING, Table, TableCell, number_cell
from tpbench.workloads import workloads
from tpbench.workloads.definition import workload_of

MACHINE_FACTS = (
    "gpu_name", "gpu_count", "nodes", "driver_version", "cuda_version", "nccl_version", "torch_version",
    "triton_version", "backend", "python_version", "os", "cpu_model", "cpu_count", "tpbench_version", "kernels_version",
    "git_commit", "git_dirty", "host",
)  # fmt: skip
"""Columns of rows that describe the machine and its software."""
GLYPHS = "●■▲◆▼✚◀"
"""The markers of pictures, as letters of a legend."""


class Section(NamedTuple):
    """A grid with its verdicts, under a name for links."""

    anchor: str
    grid: RecordGrid
    verdicts: list[ProblemVerdict]


def page(frame: pd.DataFrame, metric_name: str | None = None) -> str:
    """Return one self-contained HTML page about the newest row of each cell of `frame`.

    The tables of each section start with the metric of that name. By default they start with the device time, and with
    the wall time where no row has a device time.
    """
    grids = arrange_rows(frame)
    records = [record for grid in grids for record in grid.records]
    warnings = disagreements(records)
    disputed = frozenset[str]().union(*warnings.values())
    sections = [Section(f"s{at}", grid, verdicts_of(grid, disputed)) for at, grid in enumerate(grids)]
    of_all = [verdict for section in sections for verdict in section.verdicts]
    failed = failures(grids)
    hosts = sorted({value_text(record["host"]) for record in records if record["host"]})
    return _rendered(
        summary=_summary(records, len(frame)),
        measured_on=f"{'/'.join(dict.fromkeys(value_text(record['hardware']) for record in records))}"
        f"{'; hosts: ' + ', '.join(hosts) if hosts else ''}.",
        warnings=list(warnings),
        failures=failure_table(failed),
        failed=f"{counted(sum(map(len, failed.values())), 'cell')} without a result",
        unfolded=len(of_all) <= 20,
        side_by_side=_machines_side_by_side(of_all),
        parts=[
            _part(name, list(group), metric_name)
            for name, group in itertools.groupby(sections, key=lambda section: section.grid.workload)
        ],
        no_pictures=""
        if packages.installed("matplotlib")
        else f"Pictures need matplotlib: {packages.install_command('report')}",
        good=GOOD,
        doubts=DOUBTS,
        metrics=list(map(metric, dict.fromkeys((*TITLES, *filter(None, [metric_name]))))),
        statuses=STATUSES,
        methods=(METHOD, INTERLEAVED_METHOD),
        machines=machines(records),
    )


def _rendered(**context: Any) -> str:
    """Return the page with these values. Its policy permits no script but its own, and no access to the network."""
    try:
        import jinja2
    except ModuleNotFoundError:
        raise JobError(f"the HTML report needs jinja2: {packages.pip_install('jinja2')}") from None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tpbench.report", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    css, script = (
        (resources.files("tpbench.report.page") / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    colours = {"light": plots.LIGHT, "dark": plots.DARK}
    template = environment.get_template("report.html.j2")
    return template.render(css=css, script=script, script_hash=f"sha256-{digest}", **colours, **context)


def _summary(records: Sequence[Record], rows: int) -> str:
    count = Counter(value_text(record["status"]) for record in records)
    known = dict.fromkeys((*STATUSES, *count))
    by_status = ", ".join(f"{count[status]} {status}" for status in known if count[status])
    days = sorted({f"{record['finished_at']:%Y-%m-%d}" for record in records if record["finished_at"] is not None})
    when = f" Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}." if days else ""
    older = f" ({rows - len(records)} older rows of the same cells are left out)" if rows > len(records) else ""
    return f"{len(records)} cells: {by_status}{older}.{when}"


def _part(name: str, sections: Sequence[Section], metric_name: str | None) -> dict[str, Any]:
    """Return what the page shows of one workload, by names in the template: its answer, its picture, its sections."""
    workload = workloads().get(name)
    facts = [section.grid.facts for section in sections]
    shared = set.intersection(*(set(of_grid.items()) for of_grid in facts))
    names = [heading(dict(item for item in of_grid.items() if item not in shared)) for of_grid in facts]
    return {
        "name": name,
        "anchor": f"workload-{re.sub('[^A-Za-z0-9]+', '-', name)}",
        "summary": workload.summary if workload else "",
        "answers": answers([verdict for section in sections for verdict in section.verdicts]),
        "sections": [
            _section(section, text or "All problems", metric_name)
            for section, text in zip(sections, names, strict=True)
        ],
    }


def _section(section: Section, name: str, metric_name: str | None) -> dict[str, Any]:
    """Return what the page shows of one grid, folded, by names in the template."""
    anchor, grid, verdicts = section
    filled = [name for name in TITLES if any(record[name] is not None for record in grid.records)]
    clock = next((clock.column for clock in DECIDING if clock.column in filled), WALL.column)
    pivots: list[tuple[str, Table]] = []
    for shown in map(metric, dict.fromkeys((metric_name or clock, *filled))):
        table = metric_table(grid, shown)
        if not pivots:  # the first table of a section is the place of its rows
            lines = zip(table.rows, grid.lines.values(), strict=True)
            table = replace(table, rows=[_with_rows(cells, line) for cells, line in lines])
        title = f"{TITLES[shown.name]} ({shown.name})" if shown.name in TITLES else shown.name
        pivots.append((title, replace(table, notes=[*table.notes, *legend([table], shown)])))
    return {
        "anchor": anchor,
        "heading": name,
        "answer": answer(verdicts),
        "verdicts": verdict_table(verdicts),
        "size": f"{counted(len(grid.lines), 'problem')}, {counted(len(grid.columns), 'variant')} with options",
        "pivots": pivots,
        "figures": [_figure(grid, name, anchor) for name in dict.fromkeys((clock, CHAINED.column)) if name in filled],
        "legend": [(at % len(plots.LIGHT), GLYPHS[at % len(GLYPHS)], name) for at, name in enumerate(grid.columns)],
    }


def _with_rows(cells: Sequence[TableCell | str], line: Sequence[Record | None]) -> list[TableCell | str]:
    """Return the cells of a table's line with what the mouse shows of their rows, and with anchors of the rows."""
    keys = len(cells) - len(line)
    return [*cells[:keys]] + [
        replace(cell, hover=hover_text(record), anchor=value_text(record["row_id"]))
        if record and isinstance(cell, TableCell)
        else cell
        for cell, record in zip(cells[keys:], line, strict=True)
    ]


def _figure(grid: RecordGrid, name: str, anchor: str) -> dict[str, Any]:
    """Return the pictures of a metric: a panel for each world size, or bars of each problem without a second size."""
    shown = metric(name)
    picture = plots.by_size(grid, name, for_page=True) if packages.installed("matplotlib") else None
    if picture:
        panels = [
            plots.render(replace(picture, panels=(panel,)), f"{name} {anchor} {at}", "inline").decode()
            for at, panel in enumerate(picture.panels)
        ]
        return {"title": f"{TITLES[name]} by size, with its floor", "panels": panels, "bars": []}
    bars = []
    for key, line in grid.lines.items():
        values = [(at, record, value_of(record, shown)) for at, record in enumerate(line) if record]
        longest = max((value for *_, value in values if value), default=0.0)
        lengths = [
            (at, record.column, shown.write(value), 100 * value / longest, hover_text(record))
            for at, record, value in values
            if value
        ]
        bars += [(grid.problem_text(key, grid.varying), lengths)] if lengths else []
    return {"title": TITLES[name], "panels": [], "bars": bars}


def verdict_table(verdicts: Sequence[ProblemVerdict]) -> Table:
    """Return a line for each problem of a grid, the slowest first."""
    columns = ("problem", "fastest", "time", "runner-up", "trust", "of floor", "memory", "wall time")
    rows = [_verdict_cells(verdict) for verdict in sorted(verdicts, key=lambda verdict: -verdict.time_ms)]
    return Table("verdicts", columns, rows)


def _verdict_cells(verdict: ProblemVerdict) -> list[TableCell]:
    trust, missing = TableCell(", ".join(verdict.doubts) or GOOD), TableCell(MISSING)
    fastest, second, ratio = verdict.fastest, verdict.runner_up, verdict.ratio
    if fastest is None:
        return [TableCell(verdict.problem), *[missing] * 3, trust, *[missing] * 3]
    behind = missing
    if second and ratio:
        interval = f"{ratio_text(ratio.low)} to {ratio_text(ratio.high)}" if ratio.low and ratio.high else ""
        behind = TableCell(f"{ratio_text(ratio.value)} {second.column}", ratio.value, detail=interval)
    time = _quantity(verdict.time_ms, "ms" if verdict.clock is DEVICE else "ms wall")
    return [
        TableCell(verdict.problem),
        TableCell(fastest.column),
        replace(time, kind="best" if ratio and ratio.decided else ""),
        behind,
        trust,
        number_cell(fastest["fraction_of_floor"], "{:.0%}".format),
        _quantity(fastest["peak_gib"], "GiB"),
        _quantity(fastest["time_ms"], "ms"),
    ]


def _quantity(value: float | None, unit: str) -> TableCell:
    return number_cell(value, lambda value: f"{number(value)} {unit}")


def _machines_side_by_side(verdicts: Sequence[ProblemVerdict]) -> Table | None:
    """Return the fastest variant of each problem on each machine, or None if no problem was measured on two.

    Each cell has the fastest variant with its time, and in a second line the runner-up with its ratio.
    """
    by_problem: dict[str, dict[str, TableCell]] = defaultdict(dict)
    for verdict in verdicts:
        record = verdict.fastest
        if record is None or (workload := workload_of(record)) is None:
            continue
        nodes = f" nodes={record['nodes']}" if (record["nodes"] or 1) > 1 else ""
        problem = f"{name_of_problem(record, workload)} tp={value_text(record['tp_size'])}{nodes}"
        _, fastest, time, behind, *_ = _verdict_cells(verdict)
        cell = TableCell(f"{fastest.text} {time.text}", verdict.time_ms, "first", detail=behind.text)
        by_problem[problem].setdefault(str(verdict.grid.facts["hardware"]), cell)
    shared = {problem: cells for problem, cells in by_problem.items() if len(cells) > 1}
    machines = sorted({machine for cells in shared.values() for machine in cells})
    rows = [[problem, *(cells.get(machine, MISSING) for machine in machines)] for problem, cells in shared.items()]
    return Table("machines side by side", ["problem", *machines], rows) if rows else None


def failure_table(failed: Mapping[tuple[str, str], Sequence[str]]) -> Table:
    """Return the failed cells of all grids, merged by status and reason."""
    rows: list[list[TableCell | str]] = [
        [str(len(cells)), TableCell(status, kind=FAILED.get(status, "")), reason or "no reason given",
         printable("; ".join(cells), 600)]
        for (status, reason), cells in failed.items()
    ]  # fmt: skip
    return Table("failures", ["cells", "status", "reason", "which"], rows)


def machines(records: Sequence[Record]) -> Table:
    """Return the columns about machines and software, each with its values and their numbers of rows."""
    rows = []
    for name in MACHINE_FACTS:
        values = [record[name] for record in records if record[name] is not None]
        counts = Counter(value_text(str(value)[:8] if name == "git_commit" else value) for value in values)
        if counts:
            rows.append([name, ", ".join(f"{text} ({count})" for text, count in counts.most_common())])
    return Table("what it ran on", ("column", "values (rows)"), rows)
