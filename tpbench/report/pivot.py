"""Tables of one metric from rows: problems by variants."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from tpbench.report.analysis import row_values
from tpbench.report.analysis.comparison import INTERLEAVED_METHOD, Ratio, ratios_to_best
from tpbench.report.analysis.grid import RecordGrid, arrange_rows, disagreements, heading, mixing_note
from tpbench.report.analysis.row_values import Metric, Record, metric
from tpbench.settings import JobError
from tpbench.suggestions import number, printable_reason, ratio_text
from tpbench.tables import MISSING, UNDECIDED, Document, Table, TableCell, value_cell, value_text

FAILED = {"oom": "bad", "wrong": "bad", "timeout": "bad", "error": "bad", "skipped": "dim"}
"""Kinds of the cells of rows that are not ok, by status."""
_NOT_RUN = TableCell(MISSING, kind="dim")


def pivot(frame: pd.DataFrame, name: str = "time_ms", *, floor: bool = False, transpose: bool = False) -> Document:
    """Return tables of the newest row of each cell: problems by variants, or with `transpose` variants by problems."""
    shown = metric(name)  # first of all, because the name may be wrong
    if floor and not shown.clock:
        raise JobError(f"{name} has no floor: choose a time, such as --metric device_ms")
    grids = arrange_rows(frame)
    tables = [metric_table(grid, shown, floor=floor) for grid in grids]
    notes = [TableCell(line, kind="dim") for line in legend(tables, shown)]
    for (status, reason), cells in failures(grids).items():
        names = [*dict.fromkeys(cells)]  # cells of different tables may have one name
        shortened = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        notes.append(TableCell(f"{status}: {shortened}: {reason}", kind=FAILED.get(status, "")))
    for cell, record in [(cell, record) for grid in grids for cell, record in grid.named_records if record["trace"]]:
        notes.append(TableCell(f"trace of {cell}: {record['log_dir']}/{record['trace']}", kind="dim"))
    if transpose:
        tables = [_transposed(table, grid) for table, grid in zip(tables, grids, strict=True)]
    unit = f", in {shown.unit}" if shown.unit else ""
    least = "half the best" if shown.better > 0 else f"twice the {'fastest' if shown.unit == 'ms' else 'smallest'}"
    meaning = f"; (2.00x): {least} of its {'column' if transpose else 'line'}" if shown.better else ""
    warnings = disagreements(record for grid in grids for record in grid.records)
    return Document(tables, f"{shown.name}: {shown.doc}{unit}{meaning}", notes, [*warnings])


def metric_table(grid: RecordGrid, shown: Metric, *, floor: bool = False) -> Table:
    """Return the table of one metric for one grid. The best cell of a line has a kind if no other may be as good."""
    rows: list[list[TableCell | str]] = []
    for key, line in grid.lines.items():
        ranked = [*zip(line, ratios_to_best(line, shown), strict=True)]
        best = [record for record, ratio in ranked if record and ratio and ratio.value == 1]
        close = {record["variant"] for record, ratio in ranked if record and ratio and not ratio.decided}
        wins = sum(ratio is not None for _, ratio in ranked) > 1 and close <= {record["variant"] for record in best}
        cells = [_cell(record, shown, ratio, wins=wins) if record else _NOT_RUN for record, ratio in ranked]
        floor_ms = best[0]["floor_ms"] if best else None
        least = _NOT_RUN if floor_ms is None else TableCell(metric("floor_ms").write(floor_ms), float(floor_ms))
        rows.append([*map(value_cell, key), *cells, *([least] if floor else [])])
    return Table(
        heading=heading(grid.facts),
        columns=(*map(row_values.column_label, grid.key_names), *grid.columns, *(["floor"] if floor else [])),
        rows=rows,
        facts=grid.facts,
        notes=[*filter(None, [mixing_note(grid)])],
        keys=len(grid.key_names),
        quantity=shown.name,
    )


def _cell(record: Record, shown: Metric, ratio: Ratio | None, *, wins: bool) -> TableCell:
    """Return the cell of a row. `ratio` is how many times worse it is than the best of its line."""
    status, value, mark = value_text(record["status"]), record[shown.name], row_values.marks(record, (shown.name,))
    cell = TableCell(status, status, hover=row_values.hover_text(record), anchor=value_text(record["row_id"]))
    if status != "ok":
        note = f"{status}, {printable_reason(record['reason'] or '')}"
        return replace(cell, text="OOM" if status == "oom" else status, kind=FAILED.get(status, ""), note=note)
    if value is None:
        return replace(cell, text=status + row_values.caveat_mark(record))
    undecided = UNDECIDED if ratio and not ratio.decided else ""
    text, notes = shown.write(float(value)) + mark, row_values.mark_words(mark + undecided)
    if ratio and ratio.interleaved and ratio.low and ratio.high:
        text += f" ({number(ratio.value)}x{undecided}, {number(ratio.low)} to {number(ratio.high)})"
        notes.insert(0, "interleaved")
    elif ratio:
        text += f" ({ratio_text(ratio.value)}{undecided})"
    kind = "best" if ratio and ratio.value == 1 and wins else ""
    numbers = ratio[:3] if ratio else ()
    return replace(cell, text=text, value=float(value), kind=kind, ratio=numbers, note=", ".join(notes))


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
    further = {
        f"ok: correct, but without {shown.name}": any(cell.value == "ok" for cell in cells),
        f"(2.000x, 1.981 to 2.019): {INTERLEAVED_METHOD}": any("interleaved" in cell.note for cell in cells),
    }
    return [*row_values.mark_meanings(" ".join(cell.text for cell in cells)), *filter(further.get, further)]


def failures(grids: Sequence[RecordGrid]) -> dict[tuple[str, str], list[str]]:
    """Return the names of the cells that are not ok, by status and reason. All texts are safe to print."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell, record in [(cell, record) for grid in grids for cell, record in grid.named_records]:
        if record["status"] != "ok":
            reason = value_text(record["status"]), printable_reason(record["reason"] or "no reason given")
            groups[reason].append(cell)
    return groups
