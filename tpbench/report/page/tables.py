"""Tables of one section of the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tpbench.report.conclusions.mixing import mixing_note
from tpbench.report.grids.grid import RecordGrid
from tpbench.report.grids.records import Record, column_label, mark_meanings, value_text
from tpbench.report.numbers.clocks import CLOCKS, WALL
from tpbench.report.numbers.metric import Metric, metric
from tpbench.report.numbers.ratio import clean
from tpbench.report.numbers.samples import measured_cells, outliers, speedups
from tpbench.report.page.cells import MISSING_CELL, Digits, PageCell, PageTable, percentage, quantity, words
from tpbench.report.plots import timeline
from tpbench.report.repeat_command import row_command
from tpbench.report.tables.cell_table import OF_BEST, compared_with_best, filled_columns, percentage_columns
from tpbench.report.tables.pivot import metric_table
from tpbench.report.tables.pivot_report import PivotCell
from tpbench.results.schema import all_columns, workload_columns
from tpbench.settings import JobError
from tpbench.workloads import Study

_KINDS = {"oom": "bad", "wrong": "bad", "timeout": "bad", "error": "bad", "skipped": "dim"}
LONG = 8
"""Longest sequence, such as a number of each rank, that a cell of a table shows."""
_MEASURES = (
    "time_ms", "device_ms", "floor_ms", "fraction_of_floor", "gb_per_s",
    "copy_gb_per_s", "peak_gib", "bytes_moved", "bytes_communicated", "loss_value", "loss_error", "grad_error",
)  # fmt: skip
_TIMES = ("time_ms", "device_ms")


def pivot_table(grid: RecordGrid, shown: Metric) -> PageTable:
    """Return problems by variants. Tables of times carry all digits of their numbers."""
    made = metric_table(grid, shown)
    rows = [[*map(_key, line.keys), *(_pivot_cell(cell, shown) for cell in line.cells)] for line in made.lines]
    digits: Digits = "all" if shown.name in _TIMES else "none"
    marks = "".join(cell.remarks for line in made.lines for cell in line.cells if cell)
    notes = [note for note in made.notes if note != mixing_note(grid)]  # the section says what rows mix
    return PageTable(
        shown.name,
        [*made.keys, *made.columns],
        rows,
        digits=digits,
        notes=[*notes, *mark_meanings(marks)],
        keys=len(made.keys),
    )


def _key(text: str) -> PageCell:
    try:
        return PageCell(text, float(text))
    except ValueError:
        return PageCell(text)


def _pivot_cell(cell: PivotCell | None, shown: Metric) -> PageCell:
    if cell is None:
        return MISSING_CELL
    return PageCell(cell.text(shown), cell.value, "best" if cell.ratio == 1 else _KINDS.get(cell.status, ""))


def metrics_with_values(grid: RecordGrid, names: Sequence[str]) -> list[Metric]:
    """Return the metrics for which some cell has a value."""
    return [metric(name) for name in names if any(cell.record.get(name) is not None for cell in grid.cells())]


def distribution_table(grid: RecordGrid) -> PageTable:
    """Return percentiles and outliers of the samples of each measured cell."""
    rows = []
    for cell in measured_cells(grid):
        for clock in CLOCKS:
            samples = clean(cell.record[clock.samples_column])
            if not len(samples):
                continue
            prefix = clock.time_column.removesuffix("_ms")
            low, high = cell.record[f"{prefix}_ci_low_ms"], cell.record[f"{prefix}_ci_high_ms"]
            p5, median, p95 = np.percentile(samples, [5, 50, 95])
            far = len(outliers(samples))
            rows.append([
                words(cell.problem), words(cell.column), words(clock.name), words(len(samples)), quantity(median, "ms"),
                _interval(low, high), quantity(p5, "ms"), quantity(p95, "ms"),
                quantity(samples.min(), "ms"), quantity(samples.max(), "ms"),
                PageCell(f"{far} ({100 * far / len(samples):.1f}%)", float(far)),
                quantity(cell.record["skew_ms"], "ms") if clock is WALL else MISSING_CELL,
            ])  # fmt: skip
    columns = ["problem", "variant", "clock", "samples", "median", "95% interval", "5th pct", "95th pct", "fastest",
               "slowest", "outliers", "skew between ranks"]  # fmt: skip
    return PageTable("distributions", columns, rows, digits="none")


def _interval(low: float | None, high: float | None) -> PageCell:
    if low is None or high is None:
        return MISSING_CELL
    return PageCell(f"{quantity(low).text} to {quantity(high, 'ms').text}", low)


def speedup_table(grid: RecordGrid) -> PageTable:
    """Return the speed-ups of the fastest column of each problem over each other column."""
    rows = []
    for clock in CLOCKS:
        for each in speedups(grid, clock):
            low, high = each.ratio.low, each.ratio.high
            interval = MISSING_CELL if low is None or high is None else PageCell(f"{low:.3g}x to {high:.3g}x")
            rows.append([
                words(each.problem), words(each.fastest.column), words(each.other.column), words(clock.name),
                words("interleaved" if each.interleaved else "one after the other"),
                PageCell(f"{each.ratio.value:.3g}x", each.ratio.value), interval,
            ])  # fmt: skip
    columns = ["problem", "fastest", "over", "clock", "measured", "speed-up", "95% interval"]
    return PageTable("speed-ups", columns, rows)


def failure_table(grid: RecordGrid) -> PageTable:
    """Return the cells that are not ok, with their whole reason and the folder of their logs."""
    rows = [
        [words(grid.problem_text(cell.key)), words(cell.column), _status(cell.record),
         words(cell.record["reason"] or "no reason given", 2000), words(cell.record["log_dir"]),
         words(cell.record["row_id"])]
        for cell in grid.cells()
        if cell.record["status"] != "ok"
    ]  # fmt: skip
    return PageTable("failed cells", ["problem", "variant", "status", "reason", "logs", "row"], rows)


def study_table(grid: RecordGrid, name: str, study: Study) -> PageTable:
    """Return the numbers of a study for every cell."""
    compared = compared_with_best(grid, study)
    return replace(_cell_table(grid, filled_columns(grid, study.columns), f"study {name}", compared), digits="none")


def complete_table(grid: RecordGrid) -> PageTable:
    """Return all numbers of every cell, without sequences such as traces. What all rows share is in the notes."""
    cells = [cell.record for cell in grid.cells()]
    own = [name for name in workload_columns().get(grid.workload, {}) if name not in grid.key_names]
    filled, shared = [], []
    for name in dict.fromkeys((*_MEASURES, "launch_ms", "skew_ms", "iterations", *own)):
        values = [record.get(name) for record in cells]
        if name in timeline.COLUMNS or any(
            isinstance(value, (list, np.ndarray)) and len(value) > LONG for value in values
        ):
            continue
        if (
            name in own
            and len(cells) > 1
            and values[0] is not None
            and all(_same(value, values[0]) for value in values)
        ):
            shared.append(f"{column_label(name)}={_number(cells[0], name).text}")
        elif any(value is not None for value in values):
            filled.append(name)
    notes = [f"The same in all rows: {', '.join(shared)}."] if shared else []
    return replace(_cell_table(grid, filled, "every cell"), digits="hidden", notes=notes)


def _same(one: object, other: object) -> bool:
    return isinstance(one, (str, int, float, bool)) and one == other


def _cell_table(grid: RecordGrid, filled: Sequence[str], name: str, compared: Sequence[str] = ()) -> PageTable:
    best = [OF_BEST] if compared else []
    labels = [*map(column_label, grid.key_names), "variant", "status", *best, *map(column_label, filled)]
    rows = [
        [*map(words, cell.key), words(cell.column), _status(cell.record), *map(words, compared[at : at + 1]),
         *(_number(cell.record, name) for name in filled),
         words(cell.record["finished_at"] and f"{cell.record['finished_at']:%Y-%m-%d %H:%M} UTC"),
         _command(cell.record)]
        for at, cell in enumerate(grid.cells())
    ]  # fmt: skip
    return PageTable(name, [*labels, "finished at", "measure again"], rows)


def _command(record: Record) -> PageCell:
    """Return a button with the command that measures a row's cell again."""
    try:
        return PageCell("copy command", command=row_command(record))
    except JobError:
        return MISSING_CELL


def _status(record: Record) -> PageCell:
    status = value_text(record["status"])
    return PageCell(status, None, _KINDS.get(status, ""))


def _number(record: Record, name: str) -> PageCell:
    """Return the value of a column. Only cells of `_MEASURES` carry all digits, because a page must stay small."""
    value = record.get(name)
    if name in percentage_columns():
        cell = percentage(value)
    elif (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or (isinstance(value, int) and name not in ("bytes_moved", "bytes_communicated"))
    ):
        return words(value)
    else:
        cell = quantity(value, all_columns()[name].unit if name in all_columns() else "")
    return cell if name in _MEASURES else cell._replace(number=None)
