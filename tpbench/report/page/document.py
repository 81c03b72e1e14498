"""The whole page: what was found, then each section with its pivot, pictures, tables and failures."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from importlib import resources

import pandas as pd

from tpbench.report import plots, ratio, turns
from tpbench.report.layout import Section, lay_out
from tpbench.report.metric import METRICS, metric
from tpbench.report.page import tables
from tpbench.report.page.elements import bullets, figure, folded, paragraph, text
from tpbench.report.page.hardware import FACTS, ran_on
from tpbench.report.pivot import tabulate
from tpbench.report.plots import style
from tpbench.report.records import Record
from tpbench.report.samples import OUTLIER
from tpbench.report.study import cells
from tpbench.results.schema import STATUSES, workload_columns
from tpbench.workloads import workloads

_OTHERS = ("time_ms", "device_ms", "fraction_of_floor", "gb_per_s", "peak_gib")
_NEEDS = (
    *plots.NEEDS, *METRICS, *FACTS, "started_at", "finished_at", "log_dir",
    "time_ci_low_ms", "time_ci_high_ms", "device_ci_low_ms", "device_ci_high_ms",
)  # fmt: skip


def page(frame: pd.DataFrame, metric_name: str = "time_ms", *, all_rows: bool = False) -> str:
    """One self-contained HTML page about the newest row of each cell of `frame`, or about every row."""
    metric(metric_name)
    own = {name for columns in workload_columns().values() for name in columns}
    layout = lay_out(frame, [*_NEEDS, *own], all_rows=all_rows)
    report = tabulate(layout, metric_name)
    with_plots = style.available()
    parts = [_summary(layout.records, len(frame))]
    parts += [paragraph(f"Warning: {warning}", "warning") for warning in report.warnings]
    if not with_plots:
        parts.append(paragraph("Without plots: these need matplotlib (pip install 'tpbench[report]').", "note"))
    headings = [table.heading for table in report.tables]
    links = "".join(f'<li><a href="#s{at}">{text(heading)}</a></li>' for at, heading in enumerate(headings))
    parts.append(f"<nav><ol>{links}</ol></nav>")
    named = ""
    for at, (section, heading) in enumerate(zip(layout.sections, headings, strict=True)):
        if section.workload != named:
            named = section.workload
            known = workloads().get(named)
            parts.append(f'<h2 class="workload">{text(named)}</h2>' + (paragraph(known.summary) if known else ""))
        parts.append(f'<section id="s{at}"><h2>{text(heading)}</h2>')
        parts += _section(section, metric_name, f"s{at}", with_plots)
        parts.append("</section>")
    parts += ["<h2>Notes</h2>", bullets([report.caption, *report.legend, *_notes()])]
    parts += ["<h2>What it all ran on</h2>", ran_on(layout.records)]
    return wrap("tpbench report", "\n".join(parts))


def _summary(records: tuple[Record, ...], found: int) -> str:
    count = Counter(str(record["status"]) for record in records)
    ways = ", ".join(
        f"{count[status]} {status}" for status in (*STATUSES, *(set(count) - set(STATUSES))) if count[status]
    )
    moments = sorted(record["finished_at"] for record in records if record["finished_at"] is not None)
    when = f" Measured {moments[0]:%Y-%m-%d} to {moments[-1]:%Y-%m-%d}." if moments else ""
    older = f" ({found - len(records)} older rows of the same cells are left out)" if found > len(records) else ""
    return paragraph(f"{len(records)} cells: {ways}{older}.{when}")


def _section(section: Section, metric_name: str, salt: str, with_plots: bool) -> list[str]:
    parts = [paragraph(f"{metric_name}: {metric(metric_name).doc}"), tables.pivoted(section, metric(metric_name))]
    for other in tables.metrics_with_values(section, tuple(name for name in _OTHERS if name != metric_name)):
        parts.append(folded(f"{other.name}: {other.doc}", tables.pivoted(section, other)))

    def picture(name: str) -> list[str]:
        made = plots.inline(section, name, f"{salt}{name}") if with_plots else None
        return [figure(made, plots.PLOTS[name].title)] if made else []

    parts += [*picture("time"), *picture("device_time"), *picture("block_cap"), *picture("memory")]
    parts += picture("timeline")
    if made := tables.speedup_table(section):
        parts += [
            "<h3>Speed-ups</h3>",
            paragraph(f"{ratio.METHOD}. Or, {turns.METHOD}."),
            *picture("speedup"),
            *picture("device_speedup"),
        ]
        parts.append(folded("Speed-ups as a table", made))
    if made := tables.distributions(section):
        parts += ["<h3>Distributions</h3>", *picture("samples"), *picture("device_samples")]
        parts += [paragraph(f"Bars: quartiles; lines: 5th to 95th percentile; {OUTLIER}.")] if with_plots else []
        parts.append(folded("Distributions as a table", made))
    if made := tables.failures(section):
        parts += ["<h3>Failed cells</h3>", made]
    for name, study in (known.studies if (known := workloads().get(section.workload)) else {}).items():
        if not study.option or len({record[study.option] for _, _, record in cells(section)} - {None}) > 1:
            parts += [f"<h3>Study: {text(name)}</h3>", paragraph(study.question), tables.study(section, name, study)]
    parts += ["<h3>Every cell</h3>", folded("All numbers of every cell", tables.every_cell(section))]
    return parts


def _notes() -> list[str]:
    return [
        "floor: the time that the unavoidable bytes take at the copy bandwidth measured on the same machine",
        f"intervals of medians: order statistics; of speed-ups: {ratio.METHOD}",
        *(f"{status}: {meaning}" for status, meaning in STATUSES.items()),
    ]


def wrap(title: str, body: str) -> str:
    """A page around its content. Its policy lets nothing in but this very script and this style."""
    here = resources.files(__package__)
    script = (here / "page.js").read_text(encoding="utf-8")
    css = (here / "page.css").read_text(encoding="utf-8").replace("/* series */", _series())
    dark = "".join(f"--s{index}: {colour}; " for index, colour in enumerate(style.DARK))
    css = css.replace("/* dark series */", dark)
    # Inline styles are what matplotlib's pictures are made of; with no source allowed they can fetch nothing.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_hash(script)}'; base-uri 'none'"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n<h1>{text(title)}</h1>\n"
        f"{body}\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _series() -> str:
    return "".join(f"--s{index}: {colour}; " for index, colour in enumerate(style.LIGHT))


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
