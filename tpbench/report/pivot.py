"""Rows into tables of one metric: problems by variants."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pandas as pd

from tpbench.report.agreement import disagreements
from tpbench.report.escape import plain
from tpbench.report.layout import Layout, Row, Section, lay_out
from tpbench.report.metric import Metric, metric
from tpbench.report.ratio import Ratio
from tpbench.report.records import Record, label, say
from tpbench.report.table import COLD, INTERPRETED, Cell, Failure, Line, Report, Table
from tpbench.report.turns import in_turns
from tpbench.workloads import workloads


def pivot(frame: pd.DataFrame, metric_name: str = "time_ms", *, all_rows: bool = False) -> Report:
    """The report on `frame`: the newest row of each cell, or every row, as tables by workload and hardware.

    Every row is in exactly one cell: see `lay_out` for where.
    """
    metric(metric_name)  # before the work: the name may be wrong
    return tabulate(lay_out(frame, (metric_name,), all_rows=all_rows), metric_name)


def tabulate(layout: Layout, metric_name: str = "time_ms") -> Report:
    """The tables of one metric for rows in their places. The records must have that metric."""
    shown = metric(metric_name)
    tables, failures = [], []
    for section in layout.sections:
        table = section_table(section, shown)
        tables.append(table)
        for line in table.lines:
            named = zip(section.names, line.keys, strict=True)
            where = " ".join(f"{label(name)}={text}" for name, text in named if name not in section.derived)
            failures += [
                (cell, f"{column} {where}")
                for column, cell in zip(table.columns, line.cells, strict=True)
                if cell and cell.status != "ok"
            ]
    warnings = [plain(text, 600) for text in disagreements(list(layout.records), workloads())]
    return Report(shown, tuple(tables), _group(failures), tuple(warnings))


def section_table(section: Section, shown: Metric) -> Table:
    """The table of one section."""
    lines = tuple(_line(row, shown) for row in section.rows)
    return Table(section.facts, tuple(map(label, section.names)), section.heads, lines)


def _line(row: Row, shown: Metric) -> Line:
    cells = [_cell(record, shown) if record else None for record in row.records]
    measured = [cell for cell in cells if cell and cell.value is not None and cell.status == "ok" and not cell.mark]
    ratios = shown.ratios([cell.value for cell in measured if cell.value is not None])
    ratio = {id(cell): times for cell, times in zip(measured, ratios, strict=True)}
    best = next((record for record, cell in zip(row.records, cells, strict=True) if ratio.get(id(cell)) == 1), None)
    return Line(
        tuple(map(say, row.key)),
        tuple(
            cell
            and replace(cell, ratio=(times := ratio.get(id(cell))), by_rounds=_by_rounds(record, best, times, shown))
            for record, cell in zip(row.records, cells, strict=True)
        ),
    )


def _by_rounds(record: Record | None, best: Record | None, ratio: float | None, shown: Metric) -> Ratio | None:
    """The ratio that `ratio` says, from rounds, of a cell that took turns with the best of its line."""
    if record is None or best is None or record is best or ratio is None:
        return None
    return in_turns(record, best, shown.name)


def _cell(record: Record, shown: Metric) -> Cell:
    status = say(record["status"])
    right = status == "ok" or (status == "wrong" and shown.of_wrong)
    value = record[shown.name] if right else None
    return Cell(
        row_id=plain(str(record["row_id"])),
        status=status,
        reason=plain(record["reason"] or ""),
        value=None if value is None else float(value),
        mark=mark(record) if right else "",
    )


def mark(record: Record) -> str:
    """The mark of a row that is right but no measurement, or nothing."""
    cold = record["warmed_up"] is not None and not record["warmed_up"]
    return INTERPRETED if record["interpreted"] else COLD if cold else ""


def _group(failures: list[tuple[Cell, str]]) -> tuple[Failure, ...]:
    """Failed cells with the same status and reason, as one."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell, where in failures:
        alike[cell.status, cell.reason].append(where)
    return tuple(Failure(status, reason, tuple(cells)) for (status, reason), cells in alike.items())
