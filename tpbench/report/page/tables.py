"""The tables of one section of the HTML report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpbench.report.layout import Section
from tpbench.report.metric import Metric, metric
from tpbench.report.page.elements import NOTHING, Value, quantity, share, table, words
from tpbench.report.pivot import section_table
from tpbench.report.plots import timeline
from tpbench.report.ratio import clean
from tpbench.report.records import Record, label, say
from tpbench.report.samples import CLOCKS, measured, outliers, problem_of, speedups
from tpbench.report.study import OF_BEST, cells, shares, shown_columns, standings
from tpbench.report.table import Cell
from tpbench.results.schema import all_columns, workload_columns
from tpbench.workloads import Study

_KINDS = {"oom": "bad", "wrong": "bad", "timeout": "bad", "error": "bad", "skipped": "dim"}
_MEASURES = (
    "time_ms", "time_ci_low_ms", "time_ci_high_ms", "device_ms", "floor_ms", "fraction_of_floor", "gb_per_s",
    "copy_gb_per_s", "peak_gib", "bytes_moved", "bytes_communicated", "loss_value", "loss_error", "grad_error",
)  # fmt: skip


def pivoted(section: Section, shown: Metric) -> str:
    """Problems by variants."""
    made = section_table(section, shown)
    keys = len(made.keys)
    rows = [[*map(_key, line.keys), *(_pivot_cell(cell, shown) for cell in line.cells)] for line in made.lines]
    return table([*made.keys, *made.columns], rows, shown.name, keys=keys)


def _key(text: str) -> Value:
    try:
        return Value(text, float(text))
    except ValueError:
        return Value(text)


def _pivot_cell(cell: Cell | None, shown: Metric) -> Value:
    if cell is None:
        return NOTHING
    kind = "best" if cell.ratio == 1 else _KINDS.get(cell.status, "")
    return Value(cell.text(shown), cell.value, kind)


def distributions(section: Section) -> str | None:
    """What the samples of each cell say, or None where there are none."""
    heads = ["problem", "variant", "clock", "samples", "median", "95% interval", "5th pct", "95th pct", "fastest",
             "slowest", "outliers", "skew between ranks"]  # fmt: skip
    rows = []
    for cell in measured(section):
        for clock, name in CLOCKS.items():
            samples = clean(cell.record[clock])
            if not len(samples):
                continue
            prefix = "time" if clock == "samples_ms" else "device"
            low, high = cell.record[f"{prefix}_ci_low_ms"], cell.record[f"{prefix}_ci_high_ms"]
            p5, median, p95 = np.percentile(samples, [5, 50, 95])
            far = len(outliers(samples))
            rows.append([
                words(cell.problem), words(cell.head), words(name), words(len(samples)), quantity(median, "ms"),
                _interval(low, high, "ms"), quantity(p5, "ms"), quantity(p95, "ms"),
                quantity(samples.min(), "ms"), quantity(samples.max(), "ms"),
                Value(f"{far} ({100 * far / len(samples):.1f}%)", float(far)),
                quantity(cell.record["skew_ms"], "ms") if clock == "samples_ms" else NOTHING,
            ])  # fmt: skip
    return table(heads, rows, "distributions", keys=3) if rows else None


def _interval(low: float | None, high: float | None, unit: str) -> Value:
    if low is None or high is None:
        return NOTHING
    text, other = quantity(low).text, quantity(high, unit).text
    return Value(f"{text} to {other}", low)


def speedup_table(section: Section) -> str | None:
    """The fastest of each problem over each other column, or None where there is nothing to compare."""
    rows = []
    for clock, name in CLOCKS.items():
        for each in speedups(section, clock):
            low, high = each.ratio.low, each.ratio.high
            interval = NOTHING if low is None or high is None else Value(f"{low:.3g}x to {high:.3g}x", low)
            rows.append([
                words(each.problem), words(each.fastest.head), words(each.other.head), words(name),
                words("in turns" if each.in_turns else "one after the other"),
                Value(f"{each.ratio.value:.3g}x", each.ratio.value), interval,
            ])  # fmt: skip
    heads = ["problem", "fastest", "over", "clock", "measured", "speed-up", "95% interval"]
    return table(heads, rows, "speed-ups", keys=5) if rows else None


def failures(section: Section) -> str | None:
    """The cells that are not ok, with the whole of what is known of why, or None where all are."""
    rows = [
        [words(problem_of(section, row.key)), words(head), _status(record),
         words(record["reason"] or "no reason given", 2000), words(record["log_dir"]), words(record["row_id"])]
        for row in section.rows
        for head, record in zip(section.heads, row.records, strict=True)
        if record and record["status"] != "ok"
    ]  # fmt: skip
    return (
        table(["problem", "variant", "status", "reason", "logs", "row"], rows, "failed cells", keys=2) if rows else None
    )


def study(section: Section, name: str, study: Study) -> str:
    """The study of that name: some numbers of every cell."""
    return _numbers(section, shown_columns(section, study), f"study {name}", standings(section, study))


def every_cell(section: Section) -> str:
    """All cells with all their numbers."""
    own = [name for name in workload_columns().get(section.workload, {}) if name not in section.names]
    filled = [
        name for name in (*_MEASURES, "skew_ms", "iterations", *own)
        if name not in timeline.COLUMNS  # hundreds of numbers, which are drawn
        if any(record.get(name) is not None for _, _, record in cells(section))
    ]  # fmt: skip
    return _numbers(section, filled, "every cell")


def _numbers(section: Section, filled: Sequence[str], name: str, stands: Sequence[str] = ()) -> str:
    best = [OF_BEST] if stands else []
    heads = [*map(label, section.names), "variant", "status", *best, *map(label, filled), "finished at"]
    rows = [
        [*(words(value) for value in key), words(head), _status(record), *(words(each) for each in stands[at : at + 1]),
         *(_number(record, name) for name in filled),
         words(record["finished_at"] and f"{record['finished_at']:%Y-%m-%d %H:%M} UTC")]
        for at, (key, head, record) in enumerate(cells(section))
    ]  # fmt: skip
    return table(heads, rows, name, keys=len(section.names) + 1)


def _status(record: Record) -> Value:
    status = say(record["status"])
    return Value(status, None, _KINDS.get(status, ""))


def _number(record: Record, name: str) -> Value:
    value = record.get(name)
    if name in shares():
        return share(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return words(value)
    if isinstance(value, int) and name not in ("bytes_moved", "bytes_communicated"):
        return words(value)
    return quantity(value, all_columns()[name].unit if name in all_columns() else "")


def metrics_with_values(section: Section, names: tuple[str, ...]) -> list[Metric]:
    """Those metrics that some cell of the section has."""
    return [
        metric(name)
        for name in names
        if any(record and record.get(name) is not None for row in section.rows for record in row.records)
    ]
