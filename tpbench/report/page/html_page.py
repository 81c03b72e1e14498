"""The whole HTML report: verdicts first, then each workload's answer and picture, with everything else folded."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import Any

import pandas as pd

from tpbench import packages
from tpbench.report.analysis.grid import RecordGrid, arrange_rows
from tpbench.report.analysis.metrics import CLOCKS, TITLES, counted, metric
from tpbench.report.analysis.records import Record
from tpbench.report.analysis.uncertainty import INTERLEAVED_METHOD, METHOD
from tpbench.report.analysis.verdicts import DOUBTS, GOOD, ProblemVerdict, answer, answers, group_names
from tpbench.report.analysis.verdicts import disagreements as warnings_of
from tpbench.report.analysis.verdicts import verdicts as verdicts_of
from tpbench.report.page import page_tables
from tpbench.report.pivot import failures, legend, metric_table
from tpbench.report.plots import style
from tpbench.report.plots.grid_plots import inline_picture, with_sizes
from tpbench.results.schema import STATUSES
from tpbench.settings import JobError
from tpbench.workloads import workloads

UNFOLDED = 20
"""Most problems of a page whose sections are open."""


def page(frame: pd.DataFrame, metric_name: str | None = None) -> str:
    """Return one self-contained HTML page about the newest row of each cell of `frame`.

    The tables of each section start with the metric of that name. By default they start with the device time, and with
    the wall time where no row has a device time.
    """
    if metric_name is not None:
        metric(metric_name)
    arranged = arrange_rows(frame)
    shown = metric(metric_name or "time_ms")
    warnings = warnings_of(arranged.records)
    disputed = frozenset[str]().union(*warnings.values())
    found = [verdicts_of(grid, disputed) for grid in arranged.grids]
    sections = zip(arranged.grids, found, itertools.count(), strict=False)
    parts = [
        _part(name, list(group), metric_name)
        for name, group in itertools.groupby(sections, key=lambda each: each[0].workload)
    ]
    of_all = [verdict for of_grid in found for verdict in of_grid]
    failed = sum(map(len, failures(arranged).values()))
    return _rendered(
        title="tpbench report",
        summary=_summary(arranged.records, len(frame)),
        measured_on=page_tables.machines_line(arranged.records),
        warnings=list(warnings),
        failures=page_tables.failure_groups(arranged),
        failed=f"{counted(failed, 'cell')} without a result",
        unfolded=len(of_all) <= UNFOLDED,
        side_by_side=page_tables.machines_side_by_side(of_all),
        parts=parts,
        no_pictures="" if style.available() else f"Pictures need matplotlib: {packages.install_command('report')}",
        good=GOOD,
        doubts=DOUBTS,
        notes=[*_notes(metric_name), *legend([metric_table(grid, shown) for grid in arranged.grids], shown)],
        machines=page_tables.machines(arranged.records),
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
    colours = {"light": style.LIGHT, "dark": style.DARK}
    template = environment.get_template("report.html.j2")
    return template.render(css=css, script=script, script_hash=f"sha256-{digest}", **colours, **context)


def _summary(records: tuple[Record, ...], rows: int) -> str:
    count = Counter(str(record["status"]) for record in records)
    known = (*STATUSES, *(set(count) - set(STATUSES)))
    by_status = ", ".join(f"{count[status]} {status}" for status in known if count[status])
    days = sorted({f"{record['finished_at']:%Y-%m-%d}" for record in records if record["finished_at"] is not None})
    when = f" Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}." if days else ""
    older = f" ({rows - len(records)} older rows of the same cells are left out)" if rows > len(records) else ""
    return f"{len(records)} cells: {by_status}{older}.{when}"


def _part(
    name: str, group: Sequence[tuple[RecordGrid, list[ProblemVerdict], int]], metric_name: str | None
) -> dict[str, Any]:
    """Return what the page shows of one workload, by names in the template: its answer, its picture, its sections."""
    workload = workloads().get(name)
    names = group_names([grid for grid, _, _ in group])
    return {
        "name": name,
        "anchor": f"workload-{re.sub('[^A-Za-z0-9]+', '-', name)}",
        "summary": workload.summary if workload else "",
        "answers": answers([verdict for _, of_grid, _ in group for verdict in of_grid]),
        "sections": [
            _section(grid, of_grid, f"s{at}", text or "All problems", metric_name)
            for (grid, of_grid, at), text in zip(group, names, strict=True)
        ],
    }


def _clock(grid: RecordGrid) -> str:
    """Return the median of the leading clock: the device time where rows have it."""
    timed = (clock for clock in CLOCKS if any(cell.record[clock] is not None for cell in grid.cells()))
    return next(timed, "time_ms")


def _section(
    grid: RecordGrid, of_grid: Sequence[ProblemVerdict], anchor: str, name: str, metric_name: str | None
) -> dict[str, Any]:
    """Return what the page shows of one grid, folded, by names in the template."""
    lead, clock = metric_name or _clock(grid), _clock(grid)
    sized = with_sizes(grid) if style.available() else None
    svg = inline_picture(sized, clock, anchor) if sized else None
    others = [name for name in TITLES if name != lead and any(cell.record[name] is not None for cell in grid.cells())]
    return {
        "anchor": anchor,
        "heading": name,
        "answer": answer(of_grid),
        "verdicts": page_tables.verdict_table(of_grid),
        "size": f"{counted(len(grid.rows), 'problem')}, {counted(len(grid.columns), 'variant')} with options",
        "pivots": [
            (f"{TITLES[name]} ({name})" if name in TITLES else name, page_tables.pivot_table(grid, metric(name)))
            for name in (lead, *others)
        ],
        "figure": (f"{TITLES[clock]} by size, with its floor", svg) if svg else None,
    }


def _notes(metric_name: str | None) -> list[str]:
    """Return each method once."""
    shown = dict.fromkeys((*TITLES, *([metric_name] if metric_name else [])))
    return [
        "time: device time where rows have it, else wall time. Device time is measured by events on the GPU with "
        "launches queued ahead; wall time also contains what Python and the launches take",
        "floor: the time that the unavoidable bytes take at the copy bandwidth measured on the same machine",
        "runner-up: the fastest other variant, and how many times as long it takes. (2.00x) in tables: twice the "
        "fastest of its line",
        *(f"{each.name}: {each.doc}" for each in map(metric, shown)),
        f"trust: {GOOD}, or: {'; '.join(f'{name}: {meaning}' for name, meaning in DOUBTS.items())}",
        f"intervals of medians: order statistics; of ratios: {METHOD}. Or, {INTERLEAVED_METHOD}",
        *(f"{status}: {meaning}" for status, meaning in STATUSES.items()),
    ]
