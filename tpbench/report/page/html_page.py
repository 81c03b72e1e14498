"""The whole HTML report: verdicts first, then each workload's answer and picture, with everything else folded."""

import base64
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

import pandas as pd

from tpbench import packages
from tpbench.measure.clocks import DECIDING, TIMED, WALL
from tpbench.report import plots
from tpbench.report.analysis import row_values, verdicts
from tpbench.report.analysis.comparison import INTERLEAVED_METHOD, METHOD, value_of
from tpbench.report.analysis.grid import RecordGrid, arrange_rows, disagreements, heading
from tpbench.report.analysis.pairs import ACROSS, NOTED
from tpbench.report.analysis.row_values import TITLES, Record, metric
from tpbench.report.pivot import failures, legend, metric_table
from tpbench.results.schema import STATUSES
from tpbench.settings import JobError
from tpbench.suggestions import amount, counted, number, printable, ratio_text
from tpbench.tables import Table, value_text
from tpbench.workloads import workloads


def page(frame: pd.DataFrame, metric_name: str | None = None) -> str:
    """Return one page about the newest row of each cell. Its policy permits no network and no other script."""
    try:
        import jinja2
    except ModuleNotFoundError:
        raise JobError(f"the HTML report needs jinja2: {packages.pip_install('jinja2')}") from None
    grids = arrange_rows(frame)
    records = [record for grid in grids for record in grid.records]
    warnings = disagreements(records)
    disputed = frozenset[str]().union(*warnings.values())
    judged = [
        (f"s{at}", grid, [verdicts.verdict_of(grid, key, disputed) for key in grid.lines])
        for at, grid in enumerate(grids)
    ]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tpbench.report", "page"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    filters = (amount, number, ratio_text, counted, row_values.hover_text)
    environment.filters |= {function.__name__: function for function in filters}
    environment.globals |= {"judge": verdicts, "packages": packages, "statuses": STATUSES, "workloads": workloads()}
    script = resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    failed = [
        [str(len(cells)), status, reason, printable("; ".join(cells), 600)]
        for (status, reason), cells in failures(grids).items()
    ]
    return environment.get_template("report.html.j2").render(
        script=script,
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        summary=_summary(records, len(frame)),
        hardware=[*dict.fromkeys(value_text(record["hardware"]) for record in records)],
        hosts=sorted({value_text(record["host"]) for record in records if record["host"]}),
        warnings=list(warnings),
        failures=Table("failures", ("cells", "status", "reason", "which"), failed),
        unfolded=sum(len(of_grid) for *_, of_grid in judged) <= 20,
        parts=[
            (name, [*_sections([*of_workload], metric_name)])
            for name, of_workload in itertools.groupby(judged, key=lambda section: section[1].facts["workload"])
        ],
        metrics=list(map(metric, dict.fromkeys((*TITLES, *filter(None, [metric_name]))))),
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


def _sections(judged: Sequence[tuple[str, RecordGrid, Any]], metric_name: str | None) -> Iterator[dict[str, Any]]:
    """Yield what the page shows of each grid of one workload, by names in the template."""
    shared = set.intersection(*(set(grid.facts.items()) for _, grid, _ in judged))
    for anchor, grid, of_grid in judged:
        text = heading(dict(item for item in grid.facts.items() if item not in shared)) or "All problems"
        filled = [name for name in TITLES if any(record[name] is not None for record in grid.records)]
        clock = next((clock.column for clock in DECIDING if clock.column in filled), WALL.column)
        tables = []
        for shown in map(metric, dict.fromkeys((metric_name or clock, *filled))):
            table = metric_table(grid, shown)
            caption = f"{TITLES[shown.name]} ({shown.name})" if shown.name in TITLES else shown.name
            tables.append((caption, replace(table, notes=[*table.notes, *legend([table], shown)])))
        pictured = (clock, *(other.column for other in TIMED if other not in DECIDING))
        figures = [_figure(grid, name, anchor) for name in pictured if name in filled]
        section = {"anchor": anchor, "grid": grid, "heading": text, "verdicts": of_grid}
        yield section | {"tables": tables, "figures": figures}


def _figure(grid: RecordGrid, name: str, anchor: str) -> dict[str, Any]:
    """Return the pictures of a metric: a panel for each world size, or bars of each problem without a second size."""
    shown = metric(name)
    picture = plots.by_size(grid, name, for_page=True) if packages.installed("matplotlib") else None
    parts = [replace(picture, panels=(panel,)) for panel in picture.panels] if picture else []
    bars = {}
    for key, line in grid.lines.items() if picture is None else ():
        cells = [(at, record, row_values.interval_of(record, name)) for at, record in enumerate(line) if record]
        bars[grid.problem_text(key, grid.varying)] = [cell for cell in cells if value_of(cell[1], shown)]
    return {
        "title": TITLES[name] + (" by size, with its floor" if picture else ""),
        "metric": shown,
        "panels": [plots.render(part, f"{name} {anchor} {at}", inline=True) for at, part in enumerate(parts)],
        "bars": bars,
    }


def _machines(records: Sequence[Record]) -> Table:
    """Return the columns that a comparison checks or notes, each with its values and their numbers of rows."""
    rows = []
    for name in (*ACROSS, *NOTED):
        values = [record[name] for record in records if record[name] is not None]
        counts = Counter(value_text(str(value)[:8] if name == "git_commit" else value) for value in values)
        rows += [[name, ", ".join(f"{text} ({count})" for text, count in counts.most_common())]] if counts else []
    return Table("what it ran on", ("column", "values (rows)"), rows)
