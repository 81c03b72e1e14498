"""A history as text, Markdown or CSV."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tpbench import tables
from tpbench.report.analysis.metrics import Metric, counted
from tpbench.report.analysis.records import Record, value_text
from tpbench.report.history.change_points import ALPHA
from tpbench.report.history.series import STACK, Series
from tpbench.results.printable import printable
from tpbench.tables import Document, Table

CHANGES = ("cell", "first row after", "ratio", "before", "after", "p", "what differs")
LEVELS = ("cell", "until", "commit", "kernels", "torch", "triton", "driver", "rows", "level")
MANY = 40
"""Lines of levels that a history shows without `--all`, even of cells that did not change."""


def is_worse(series: Series, shown: Metric) -> bool:
    """Return true if the newest level of a cell is worse than the one before it."""
    return bool(series.changes) and (series.changes[-1].ratio - 1) * shown.better < 0


def text(all_series: Sequence[Series], shown: Metric, threshold: float, all_cells: bool) -> str:
    """Return aligned columns."""
    return f"{tables.as_text(_document(all_series, shown, threshold, all_cells)).plain}\n"


def markdown(all_series: Sequence[Series], shown: Metric, threshold: float, all_cells: bool) -> str:
    """Return tables for an issue or a page."""
    return tables.as_markdown(_document(all_series, shown, threshold, all_cells))


def comma_separated(all_series: Sequence[Series], shown: Metric, threshold: float, all_cells: bool) -> str:
    """Return a line for each period of each cell, with all digits. A change stands in the line of its first row."""
    columns = ["cell", "started_at", *STACK, "rows", f"level {shown.name}", "ratio of change", "p"]
    lines: list[list[str | float | None]] = []
    for series in all_series:
        changed = {series.rows[change.at]["row_id"]: change for change in series.changes}
        for period in series.periods:
            here = [changed[row["row_id"]] for row in period.rows if row["row_id"] in changed]
            first = period.rows[0]
            stack = [printable(value_text(first.get(name))) for name in STACK]
            numbers = (here[0].ratio, here[0].p) if here else (None, None)
            started = printable(value_text(first["started_at"]))
            lines.append([printable(series.name), started, *stack, len(period.rows), period.level, *numbers])
    return tables.csv_text(columns, lines)


def _document(all_series: Sequence[Series], shown: Metric, threshold: float, all_cells: bool) -> Document:
    changed = [each for each in all_series if each.changes]
    failed = [each for each in all_series if each.failure]
    rows = sum(len(each.rows) for each in all_series)
    summary = f"{shown.name} of {counted(len(all_series), 'cell')} in {counted(rows, 'row')}: {len(changed)} changed"
    summary += f", {len(failed)} fail{'s' if len(failed) == 1 else ''} now"
    levels = [line for each in all_series for line in _level_lines(each, shown)]
    notes = []
    if len(levels) > MANY and not all_cells:
        levels = [line for each in changed for line in _level_lines(each, shown)]
        unchanged = len(all_series) - len(changed)
        notes.append(f"{counted(unchanged, 'cell')} did not change: --all lists their levels, too.")
    found = [
        Table("Changes", CHANGES, _change_lines(changed, shown)),
        Table(
            "Cells that fail now",
            ("cell", "status", "first failure"),
            [[printable(each.name), *_failure(each)] for each in failed],
        ),
        Table("Levels by commit and software", LEVELS, levels, notes=notes),
    ]
    method = [
        f"A change is a point of a cell's rows where the level differs by more than {100 * threshold:.3g}%, and a t "
        f"test of the logarithms has p < {ALPHA} after Bonferroni's correction for all points of all cells.",
        f"A history without changes has a false alarm with a chance of at most {ALPHA:.0%}, if rows scatter "
        "independently.",
        "A level is the geometric mean of its rows.",
    ]
    return Document([table for table in found if table.rows], summary, method)


def _change_lines(changed: Sequence[Series], shown: Metric) -> list[list[str]]:
    lines = []
    for series in changed:
        edges = [0, *(change.at for change in series.changes), len(series.rows)]
        levels = [series.level(start, end) for start, end in itertools.pairwise(edges)]
        for at, change in enumerate(series.changes):
            differs = "; ".join(series.differences(change)) or "nothing that rows record"
            values = [shown.write(level) for level in levels[at : at + 2]]
            lines.append(
                [printable(series.name), _moment(series.rows[change.at]), f"{change.ratio:.3f}", *values,
                 f"{change.p:.2g}", printable(differs, 300)]
            )  # fmt: skip
    return lines


def _level_lines(series: Series, shown: Metric) -> list[list[str]]:
    return [
        [
            printable(series.name),
            _moment(period.rows[-1]),
            *(printable(_text(period.rows[-1], name), 40) for name in STACK_SHOWN),
            str(len(period.rows)),
            shown.write(period.level),
        ]
        for period in series.periods
    ]


STACK_SHOWN = ("git_commit", "kernels_version", "torch_version", "triton_version", "driver_version")


def _text(row: Record, name: str) -> str:
    text = value_text(row.get(name))
    if name == "kernels_version" and row.get("variant_version") is not None:
        return f"{text}, file {value_text(row['variant_version'])[:8]}"
    return f"{text[:8]}{' and changes' if row.get('git_dirty') else ''}" if name == "git_commit" else text


def _moment(row: Record) -> str:
    return f"{row['started_at']:%Y-%m-%d %H:%M}" if row.get("started_at") else value_text(None)


def _failure(series: Series) -> list[str]:
    assert series.failure is not None
    reason = f"{_moment(series.failure)}: {value_text(series.failure['reason'])}"
    return [value_text(series.failure["status"]), printable(reason)]
