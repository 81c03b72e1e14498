"""Tables of one metric from rows: problems by variants."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from tpbench.report.analysis.comparison import INTERLEAVED_METHOD, Ratio, ratios_to_best
from tpbench.report.analysis.grid import RecordGrid, arrange_rows, heading
from tpbench.report.analysis.metrics import Metric, metric, number, ratio_text
from tpbench.report.analysis.records import (
    Record,
    caveat_mark,
    column_label,
    mark_meanings,
    mark_word,
    marks,
    value_cell,
    value_text,
)
from tpbench.report.analysis.verdicts import disagreements, mixing_note
from tpbench.settings import JobError
from tpbench.suggestions import printable
from tpbench.tables import MISSING, Document, Table, TableCell

FLOOR = "floor"
"""Name of the column with the time of the unavoidable bytes and FLOPs."""
FAILED = {"oom": "bad", "wrong": "bad", "timeout": "bad", "error": "bad", "skipped": "dim"}
"""Kinds of the cells of rows that are not ok, by status."""
UNDECIDED = "?"
"""Mark of a ratio whose interval includes a tie."""
_NOT_RUN = TableCell(MISSING, kind="dim")


def pivot(
    frame: pd.DataFrame, metric_name: str = "time_ms", *, floor: bool = False, transpose: bool = False
) -> Document:
    """Return tables of the newest row of each cell, by workload and hardware.

    `floor` adds a column with the floor of the fastest row of each line. `transpose` returns a line for each variant
    and a column for each problem. Raises JobError for an unknown metric, and for a floor of a metric that isn't a time.
    """
    shown = metric(metric_name)  # first of all, because the name may be wrong
    if floor and not shown.is_time:
        raise JobError(f"{metric_name} has no floor: choose a time, such as --metric device_ms")
    grids = arrange_rows(frame)
    records = [record for grid in grids for record in grid.records]
    tables = [metric_table(grid, shown, floor=floor) for grid in grids]
    notes = [TableCell(line, kind="dim") for line in legend(tables, shown)]
    for (status, reason), cells in failures(grids).items():
        names = [*dict.fromkeys(cells)]  # cells of different tables may have one name
        shortened = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        notes.append(TableCell(f"{status}: {shortened}: {reason or 'no reason given'}", kind=FAILED.get(status, "")))
    traced = [(grid, record) for grid in grids for record in grid.records if record["trace"]]
    for grid, record in traced:
        place = f"{record['log_dir']}/{record['trace']}"
        notes.append(TableCell(f"trace of {record.column} {grid.problem_text(record.key)}: {place}", kind="dim"))
    if transpose:
        tables = [_transposed(table, grid) for table, grid in zip(tables, grids, strict=True)]
    unit = f", in {shown.unit}" if shown.unit else ""
    least = "half the best" if shown.better > 0 else f"twice the {'fastest' if shown.unit == 'ms' else 'smallest'}"
    meaning = f"; (2.00x): {least} of its {'column' if transpose else 'line'}" if shown.better else ""
    return Document(tables, f"{shown.name}: {shown.doc}{unit}{meaning}", notes, [*disagreements(records)])


def metric_table(grid: RecordGrid, shown: Metric, *, floor: bool = False) -> Table:
    """Return the table of one metric for one grid."""
    rows: list[list[TableCell | str]] = []
    for key, line in grid.lines.items():
        ratios = ratios_to_best(line, shown)
        rows.append([*map(value_cell, key), *_cells(line, ratios, shown), *([_floor(line, ratios)] if floor else [])])
    return Table(
        heading=heading(grid.facts),
        columns=(*map(column_label, grid.key_names), *grid.columns, *([FLOOR] if floor else [])),
        rows=rows,
        facts=grid.facts,
        notes=[*filter(None, [mixing_note(grid)])],
        keys=len(grid.key_names),
        quantity=shown.name,
    )


def _cells(line: Sequence[Record | None], ratios: Sequence[Ratio | None], shown: Metric) -> list[TableCell]:
    """Return the cells of one problem.

    The best has its kind only if it isn't alone, and if no other variant may be as good.
    """
    ranked = [(record["variant"], ratio) for record, ratio in zip(line, ratios, strict=True) if record and ratio]
    winners = {variant for variant, ratio in ranked if ratio.value == 1}
    wins = len(ranked) > 1 and winners.issuperset(variant for variant, ratio in ranked if not ratio.decided)
    cells = zip(line, ratios, strict=True)
    return [_cell(record, shown, ratio, wins=wins) if record else _NOT_RUN for record, ratio in cells]


def _cell(record: Record, shown: Metric, ratio: Ratio | None, *, wins: bool) -> TableCell:
    """Return the cell of a row. `ratio` is how many times worse it is than the best of its line."""
    status, value, mark = value_text(record["status"]), record[shown.name], marks(record, (shown.name,))
    if status != "ok":
        note = f"{status}, {printable(record['reason'] or '')}"
        return TableCell("OOM" if status == "oom" else status, status, FAILED.get(status, ""), note=note)
    if value is None:
        return TableCell(status + caveat_mark(record), status)
    text, notes = shown.write(float(value)) + mark, [mark_word(letter) for letter in mark]
    undecided = "" if not ratio or ratio.decided else UNDECIDED
    if ratio and ratio.interleaved and ratio.low and ratio.high:
        text += f" ({number(ratio.value)}x{undecided}, {number(ratio.low)} to {number(ratio.high)})"
        notes.insert(0, "interleaved")
    elif ratio:
        text += f" ({ratio_text(ratio.value)}{undecided})"
    notes += ["undecided"] if undecided else []
    kind = "best" if ratio and ratio.value == 1 and wins else ""
    numbers = (ratio.value, ratio.low, ratio.high) if ratio else ()
    return TableCell(text, float(value), kind, numbers, ", ".join(notes))


def _floor(line: Sequence[Record | None], ratios: Sequence[Ratio | None]) -> TableCell:
    pairs = zip(line, ratios, strict=True)
    fastest = next((record for record, ratio in pairs if record and ratio and ratio.value == 1), None)
    if not fastest or fastest["floor_ms"] is None:
        return _NOT_RUN
    return TableCell(metric("floor_ms").write(fastest["floor_ms"]), float(fastest["floor_ms"]))


def _transposed(table: Table, grid: RecordGrid) -> Table:
    """Return a line for each column. Keys in which the problems do not differ stand in the heading."""
    shared, keys = [at for at in grid.independent if at not in grid.varying], list(grid.lines)
    facts = grid.problem_text(keys[0], shared).split() if shared else []
    columns = zip(*(cells[table.keys :] for cells in table.cells), strict=True)
    return replace(
        table,
        heading=", ".join((table.heading, *facts)),
        columns=("variant", *(grid.problem_text(key, grid.varying) for key in keys)),
        rows=[[name, *cells] for name, cells in zip(table.columns[table.keys :], columns, strict=True)],
        keys=1,
    )


def legend(tables: Sequence[Table], shown: Metric) -> list[str]:
    """Return the meaning of the marks that occur, and of "ok" without a value."""
    cells = [cell for table in tables for row in table.cells for cell in row[table.keys :]]
    text = " ".join(cell.text for cell in cells)
    lines = list(mark_meanings(text))
    if UNDECIDED in text:
        lines.append(
            f"{UNDECIDED} undecided: two runs may differ as much by chance alone, or samples are too few to tell"
        )
    if any(cell.value == "ok" for cell in cells):
        lines.append(f"ok: correct, but without {shown.name}")
    if any("interleaved" in cell.note for cell in cells):
        lines.append(f"(2.000x, 1.981 to 2.019): {INTERLEAVED_METHOD}")
    return lines


def failures(grids: Sequence[RecordGrid]) -> dict[tuple[str, str], list[str]]:
    """Return the names of the cells that are not ok, by status and reason. All texts are safe to print."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for grid in grids:
        for record in grid.records:
            if record["status"] != "ok":
                reason = value_text(record["status"]), printable(record["reason"] or "")
                groups[reason].append(f"{record.column} {grid.problem_text(record.key)}")
    return groups
