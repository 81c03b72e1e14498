"""`tpbench history FOLDER...`: a metric by time and cell, and an exit code for continuous integration."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import pandas as pd

from tpbench.report import command_line
from tpbench.report.analysis import changes
from tpbench.report.analysis.changes import CellChange, Comparison
from tpbench.report.analysis.comparison import value_of
from tpbench.report.analysis.pairs import ACROSS, BESIDE, cell_names, remarks, rows_by_cell, stack
from tpbench.report.analysis.row_values import Metric, Record
from tpbench.settings import JobError
from tpbench.suggestions import counted, number, printable
from tpbench.tables import MISSING, Document, Table, TableCell, number_cell, value_text

Level: TypeAlias = tuple[Record, ...]
COLUMNS = ("cell", "since", "commit", "rows", "level", "ratio", "p", "verdict", "what differs")


def main(arguments: Sequence[str]) -> int:
    """Run the command. Raises JobError if nothing was compared: a check of nothing must not pass."""
    parser = command_line.ReportParser(
        "history",
        tuple(command_line.TABLES),
        description="A metric of every cell over time, by commit and by software stack. Exit code 1 if the newest "
        "level of a cell is worse than the one before or its newest row failed, 2 if no cell was measured twice.",
        epilog="A level is the geometric mean of rows that follow each other with the same code, packages and machine. "
        "The test is that of `tpbench compare`.",
    )
    parser.add_filters()
    parser.add_test(0.02)
    options = parser.parse(arguments)
    frame = command_line.selected_rows(options)
    shown = command_line.tested_metric(options, {"": frame})
    history = all_levels(frame, shown)
    pairs = [(name, levels[-2], levels[-1]) for name, levels in history if len(levels) > 1]
    comparison = changes.compare_cells(pairs, shown, options.threshold, ACROSS)
    command_line.write(_document(history, comparison, options.format in ("csv", "json")), options)
    if not any(change.is_decided for change in comparison.changes):
        why = "no cell was measured twice"
        if others := len(frame) - sum(len(level) for _, levels in history for level in levels):
            why += f" ({counted(others, 'row')} beside other jobs or without {shown.name} left out)"
        reasons = Counter("; ".join(change.notes) for change in comparison.changes).most_common(1)
        raise JobError(f"nothing was compared: {reasons[0][0] if reasons else why}")
    return int(any(change.fails for change in comparison.changes))


def all_levels(frame: pd.DataFrame, shown: Metric) -> list[tuple[str, list[Level]]]:
    """Return the name and the levels, in time order, of every cell with a measurement. A failure at the end is one."""
    cells = rows_by_cell(frame)
    names = cell_names(cells)
    several = len({machine for machines in cells.values() for machine in machines}) > 1
    history: list[tuple[str, list[Level]]] = []
    for cell, machines in cells.items():
        for machine, rows in machines.items():
            measured = [row for row in rows if not row[BESIDE] and value_of(row, shown) is not None]
            levels = [tuple(group) for _, group in itertools.groupby(measured, key=stack)]
            if rows[-1]["status"] in changes.FAILED:
                levels += [tuple(rows[-1:])]
            elif len(levels) == 1 and len(measured) > 1:
                levels = [tuple(measured[:-1]), tuple(measured[-1:])]
            if measured:
                history.append((f"{names[cell]} on {value_text(machine)}" if several else names[cell], levels))
    return history


def _document(history: Sequence[tuple[str, list[Level]]], comparison: Comparison, all_cells: bool) -> Document:
    """Return the levels of all cells, or of those whose newest level changed, with a verdict on it."""
    newest = {change.name: change for change in comparison.changes}
    changed = [change for change in comparison.changes if change.verdict not in (changes.SAME, changes.UNCLEAR)]
    failing = sum(change.verdict == changes.FAILS for change in changed)
    rows = sum(len(level) for _, levels in history for level in levels)
    caption = (
        f"{comparison.metric.name} of {counted(len(history), 'cell')} in {counted(rows, 'row')}: the newest level "
        f"of {len(changed) - failing} changed, {failing} fail{'s' if failing == 1 else ''} now"
    )
    sentences, names = comparison.method(), {change.name for change in changed}
    listed = [(name, levels) for name, levels in history if name in names or all_cells]
    if others := len(history) - len(listed):
        sentences.insert(0, f"{counted(others, 'cell')} did not change: --format csv lists their levels, too.")
    lines = [
        _line(name, before, level, newest.get(name) if level is levels[-1] else None, comparison.metric)
        for name, levels in listed
        for before, level in itertools.pairwise(((), *levels))
    ]
    return Document([Table("", COLUMNS, lines)] if lines else [], caption, sentences)


def _line(name: str, before: Level, level: Level, newest: CellChange | None, shown: Metric) -> list[TableCell | str]:
    """Return the line of a level. That of a cell's newest one has the verdict on it (`newest`)."""
    row, started = level[-1], level[0]["started_at"]
    value, old = changes.level(level, shown), changes.level(before, shown)
    notes = newest.notes if newest else remarks(before[-1], row, ACROSS) if before else []
    commit = printable(row["user_commit"] or value_text(row["git_commit"]) + " and changes" * bool(row["git_dirty"]))
    return [
        printable(name), f"{started:%Y-%m-%d %H:%M}" if started else MISSING,
        TableCell(" ".join([commit[:8], *commit.split()[1:]]), commit), TableCell(str(len(level)), len(level)),
        number_cell(value, shown.write),
        number_cell(value / old if value and old else None, number),
        number_cell(newest.p if newest else None, "{:.2g}".format),
        TableCell(newest.verdict, kind="bad" if newest.fails else "") if newest else MISSING,
        printable("; ".join(notes), 300) or ("nothing that rows record" if before else MISSING),
    ]  # fmt: skip
