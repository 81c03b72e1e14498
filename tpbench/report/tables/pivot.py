"""Tables of one metric from rows: problems by variants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from tpbench.report.conclusions.agreement import disagreements, printed
from tpbench.report.conclusions.mixing import mixing_note
from tpbench.report.grids.arrange import arrange_rows
from tpbench.report.grids.grid import GridRow, RecordGrid, RecordGrids
from tpbench.report.grids.records import (
    HOST_BOUND,
    Record,
    caveat_mark,
    column_label,
    memory_mark,
    time_marks,
    value_text,
)
from tpbench.report.numbers.interleaved import interleaved_ratio
from tpbench.report.numbers.metric import Metric, metric
from tpbench.report.tables.pivot_report import FailureGroup, PivotCell, PivotLine, PivotReport, PivotTable
from tpbench.settings import JobError
from tpbench.suggestions import printable
from tpbench.workloads import workloads

FLOOR = "floor"
"""Name of the column with the time of the unavoidable bytes and FLOPs."""


def pivot(
    frame: pd.DataFrame,
    metric_name: str = "time_ms",
    *,
    all_rows: bool = False,
    floor: bool = False,
    transpose: bool = False,
) -> PivotReport:
    """Return tables of the newest row of each cell, or of every row, by workload and hardware.

    Each row is in exactly one cell (see `arrange_rows`). `floor` adds a column with the floor of the fastest row of
    each line. `transpose` returns a line for each variant and a column for each problem. Raises JobError for an unknown
    metric, and for a floor of a metric that is no time.
    """
    shown = metric(metric_name)  # first of all, because the name may be wrong
    if floor and not (shown.is_wall_time or shown.is_device_time):
        raise JobError(f"{metric_name} has no floor: choose a time, such as --metric device_ms")
    arranged = arrange_rows(frame, (metric_name, "floor_ms"), all_rows=all_rows)
    report = tabulate(arranged, metric_name)
    tables = report.tables
    if floor:
        tables = tuple(_with_floor(*each) for each in zip(tables, arranged.grids, strict=True))
    if transpose:
        tables = tuple(_transposed(*each) for each in zip(tables, arranged.grids, strict=True))
        shown = replace(shown, ratio=shown.ratio.replace("line", "column"))
    return replace(report, metric=shown, tables=tables)


def _with_floor(table: PivotTable, grid: RecordGrid) -> PivotTable:
    lines = []
    for line, row in zip(table.lines, grid.rows, strict=True):
        pairs = zip(line.cells, row.records, strict=True)
        best = next((record for cell, record in pairs if cell and cell.ratio == 1 and record), None)
        has_floor = best is not None and best["floor_ms"] is not None
        floor = PivotCell(str(best["row_id"]), "ok", value=best["floor_ms"]) if best and has_floor else None
        lines.append(replace(line, cells=(*line.cells, floor)))
    return replace(table, columns=(*table.columns, FLOOR), lines=tuple(lines))


def _transposed(table: PivotTable, grid: RecordGrid) -> PivotTable:
    """Return a line for each column. Keys in which the problems do not differ stand in the heading."""
    shared = [at for at in grid.independent if at not in grid.varying]
    facts = grid.problem_text(grid.rows[0].key, shared) if shared else ""
    columns = zip(*(line.cells for line in table.lines), strict=True)
    return PivotTable(
        heading=", ".join((table.heading, *facts.split())),
        facts=table.facts,
        keys=("variant",),
        columns=tuple(grid.problem_text(row.key, grid.varying) for row in grid.rows),
        lines=tuple(PivotLine((name,), cells) for name, cells in zip(table.columns, columns, strict=True)),
        notes=table.notes,
    )


def tabulate(arranged: RecordGrids, metric_name: str = "time_ms") -> PivotReport:
    """Return the tables of one metric. The records must have the metric's column."""
    shown = metric(metric_name)
    tables, failures = [], []
    for grid in arranged.grids:
        table = metric_table(grid, shown)
        tables.append(table)
        unnamed = grid.derived | grid.tie_breaking_keys
        for line in table.lines:
            named = zip(grid.key_names, line.keys, strict=True)
            problem = " ".join(f"{column_label(name)}={text}" for name, text in named if name not in unnamed)
            failures += [
                (cell, f"{column} {problem}")
                for column, cell in zip(table.columns, line.cells, strict=True)
                if cell and cell.status != "ok"
            ]
    warnings = printed(disagreements(list(arranged.records), workloads()))
    return PivotReport(shown, tuple(tables), _group(failures), warnings)


def metric_table(grid: RecordGrid, shown: Metric) -> PivotTable:
    """Return the table of one metric for one grid."""
    lines = tuple(_line(row, shown) for row in grid.rows)
    notes = tuple(filter(None, [mixing_note(grid), _host_bound_note(lines)]))
    return PivotTable(grid.heading, grid.facts, tuple(map(column_label, grid.key_names)), grid.columns, lines, notes)


def _host_bound_note(lines: Sequence[PivotLine]) -> str:
    """Return a sentence about the problems that compare host-bound cells with others. Empty: there are none."""
    compared = [[cell for cell in line.cells if cell and cell.ratio is not None] for line in lines]
    concerned = sum(len(cells) > 1 and any(HOST_BOUND in each.remarks for each in cells) for cells in compared)
    if not concerned:
        return ""
    meaning = "the host decides their wall time"
    return f"{concerned} of {len(lines)} problems compare host-bound cells ({HOST_BOUND}): {meaning}"


def _line(row: GridRow, shown: Metric) -> PivotLine:
    cells = [_cell(record, shown) if record else None for record in row.records]
    measured = [cell for cell in cells if cell and cell.value is not None and cell.status == "ok" and not cell.mark]
    ratios = shown.ratios([cell.value for cell in measured if cell.value is not None])
    ratio_of = {id(cell): ratio for cell, ratio in zip(measured, ratios, strict=True)}
    best = next((record for record, cell in zip(row.records, cells, strict=True) if ratio_of.get(id(cell)) == 1), None)
    completed = []
    for record, cell in zip(row.records, cells, strict=True):
        ratio, by_rounds = ratio_of.get(id(cell)), None
        if record and best and record is not best and ratio is not None:
            by_rounds = interleaved_ratio(record, best, shown.name)
        completed.append(cell and replace(cell, ratio=ratio, interleaved_ratio=by_rounds))
    return PivotLine(tuple(map(value_text, row.key)), tuple(completed))


def _cell(record: Record, shown: Metric) -> PivotCell:
    status = value_text(record["status"])
    has_value = status == "ok" or (status == "wrong" and shown.shown_if_wrong)
    value = record[shown.name] if has_value else None
    remarks = ""
    if value is not None:
        remarks = (time_marks if shown.is_speed else memory_mark)(record, (shown.name,))
    return PivotCell(
        row_id=printable(str(record["row_id"])),
        status=status,
        reason=printable(record["reason"] or ""),
        value=None if value is None else float(value),
        mark=caveat_mark(record) if has_value else "",
        remarks=remarks,
        device_ms=record["device_ms"] if HOST_BOUND in remarks else None,
    )


def _group(failures: list[tuple[PivotCell, str]]) -> tuple[FailureGroup, ...]:
    """Merge failed cells that have the same status and reason."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell, name in failures:
        alike[cell.status, cell.reason].append(name)
    return tuple(FailureGroup(status, reason, tuple(cells)) for (status, reason), cells in alike.items())
