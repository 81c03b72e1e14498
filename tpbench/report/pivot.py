"""Tables of one metric from rows: problems by variants."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from tpbench.report.analysis.grid import GridRow, RecordGrid, arrange_rows, heading
from tpbench.report.analysis.metrics import Metric, metric, number, ratio_text
from tpbench.report.analysis.records import (
    UNDECIDED,
    Record,
    caveat_mark,
    column_label,
    common_remarks,
    mark_meanings,
    mark_word,
    marks,
    marks_beside,
    ratios_to_best,
    value_text,
)
from tpbench.report.analysis.uncertainty import INTERLEAVED_METHOD, Ratio, ratio_of_records
from tpbench.report.analysis.verdicts import disagreements, mixing_note
from tpbench.settings import JobError
from tpbench.suggestions import printable
from tpbench.tables import MISSING, Document, Table, TableCell

FLOOR = "floor"
"""Name of the column with the time of the unavoidable bytes and FLOPs."""
FAILED = {"oom": "bad", "wrong": "bad", "timeout": "bad", "error": "bad", "skipped": "dim"}
"""Kinds of the cells of rows that are not ok, by status."""
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
    records = [cell.record for grid in grids for cell in grid.cells()]
    tables = [metric_table(grid, shown, floor=floor) for grid in grids]
    notes = [TableCell(line, kind="dim") for line in legend(tables, shown)]
    for (status, reason), cells in failures(grids).items():
        names = [*dict.fromkeys(cells)]  # cells of different tables may have one name
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        line = f"{status}: {', '.join(names[:2])}{more}: {reason or 'no reason given'}"
        notes.append(TableCell(line, kind=FAILED.get(status, "")))
    for record in records:
        if record["trace"]:
            line = f"trace of {record['label'] or record['variant']}: {record['log_dir']}/{record['trace']}"
            notes.append(TableCell(line, kind="dim"))
    if transpose:
        tables = [_transposed(table, grid) for table, grid in zip(tables, grids, strict=True)]
    unit = f", in {shown.unit}" if shown.unit else ""
    meaning = shown.ratio_meaning.replace("line", "column") if transpose else shown.ratio_meaning
    caption = f"{shown.name}: {shown.doc}{unit}" + (f"; (2.00x): {meaning}" if meaning else "")
    return Document(tables, caption, notes, [*disagreements(records)])


def metric_table(grid: RecordGrid, shown: Metric, *, floor: bool = False) -> Table:
    """Return the table of one metric for one grid."""
    rows: list[list[TableCell | str]] = []
    records = [cell.record for cell in grid.cells() if cell.record["status"] == "ok"]
    common, remarks = common_remarks(
        [marks(record, (shown.name,)) for record in records if record[shown.name] is not None]
    )
    for row in grid.rows:
        cells = _cells(row, shown, common)
        rows.append([*map(value_text, row.key), *cells, *([_floor(row, cells)] if floor else [])])
    return Table(
        heading=heading(grid.facts),
        columns=(*map(column_label, grid.key_names), *grid.columns, *([FLOOR] if floor else [])),
        rows=rows,
        facts=grid.facts,
        notes=[*remarks, *filter(None, [mixing_note(grid)])],
        keys=len(grid.key_names),
        quantity=shown.name,
    )


def _cells(row: GridRow, shown: Metric, common: str) -> list[TableCell]:
    """Return the cells of one problem. `common` are the remarks that most cells of the table have.

    The best has its kind only if it isn't alone, and if no other variant may be as good.
    """
    ratios = ratios_to_best(row.records, shown)
    ranked = [(record, ratio) for record, ratio in zip(row.records, ratios, strict=True) if record and ratio]
    best = {bool(record["fresh"]): record for record, ratio in ranked[::-1] if ratio == 1}
    compared = {
        id(record): ratio_of_records(record, best[bool(record["fresh"])], shown)
        for record, _ in ranked
        if shown.is_speed and record is not best[bool(record["fresh"])]
    }
    winners = {record["variant"] for record in best.values()}
    tied = [record["variant"] for record, _ in ranked if (found := compared.get(id(record))) and not found.decided]
    wins = len(ranked) > 1 and winners.issuperset(tied)
    return [
        _cell(record, shown, ratio, compared.get(id(record)), common, wins=wins) if record else _NOT_RUN
        for record, ratio in zip(row.records, ratios, strict=True)
    ]


def _cell(
    record: Record, shown: Metric, ratio: float | None, compared: Ratio | None, common: str, *, wins: bool
) -> TableCell:
    """Return the cell of a row. `compared` is its ratio to the best of its line, with an interval."""
    status, value = value_text(record["status"]), record[shown.name]
    if status != "ok":
        note = f"{status}, {printable(record['reason'] or '')}"
        return TableCell("OOM" if status == "oom" else status, status, FAILED.get(status, ""), note=note)
    if value is None:
        return TableCell(status + caveat_mark(record), status)
    mark = marks(record, (shown.name,))
    text, notes = shown.write(float(value)) + marks_beside(mark, common), [mark_word(letter) for letter in mark]
    undecided = UNDECIDED if compared and not compared.decided else ""
    if compared and compared.interleaved and compared.low and compared.high:
        text += f" ({number(compared.value)}x{undecided}, {number(compared.low)} to {number(compared.high)})"
        notes.insert(0, f"{compared.value!r}x interleaved, {compared.low!r} to {compared.high!r}")
    elif ratio is not None:
        text += f" ({ratio_text(ratio)}{undecided})"
    notes += ["undecided"] if undecided else []
    return TableCell(text, float(value), "best" if ratio == 1 and wins else "", ratio, ", ".join(notes))


def _floor(row: GridRow, cells: Sequence[TableCell]) -> TableCell:
    """Return the floor of the fastest row of a problem."""
    fastest = next((record for record, cell in zip(row.records, cells, strict=True) if cell.ratio == 1), None)
    if not fastest or fastest["floor_ms"] is None:
        return _NOT_RUN
    return TableCell(metric("floor_ms").write(fastest["floor_ms"]), float(fastest["floor_ms"]))


def _transposed(table: Table, grid: RecordGrid) -> Table:
    """Return a line for each column. Keys in which the problems do not differ stand in the heading."""
    shared = [at for at in grid.independent if at not in grid.varying]
    facts = grid.problem_text(grid.rows[0].key, shared).split() if shared else []
    columns = zip(*(cells[table.keys :] for cells in table.cells), strict=True)
    return replace(
        table,
        heading=", ".join((table.heading, *facts)),
        columns=("variant", *(grid.problem_text(row.key, grid.varying) for row in grid.rows)),
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
        for cell in grid.cells():
            if cell.record["status"] != "ok":
                reason = value_text(cell.record["status"]), printable(cell.record["reason"] or "")
                groups[reason].append(f"{cell.column} {grid.problem_text(cell.key)}")
    return groups
