"""The tables of one metric as text, Markdown or CSV."""

from __future__ import annotations

import pandas as pd
from rich.console import Console
from rich.text import Text

from tpbench.report.grids.records import (
    BELOW_FLOOR,
    GRAPH_MEMORY,
    HOST_BOUND,
    INTERPRETED,
    MISSING,
    SINGLE_PASS,
    THROTTLED,
)
from tpbench.report.tables import writer
from tpbench.report.tables.pivot import pivot
from tpbench.report.tables.pivot_report import PivotCell, PivotReport

_STYLES = {"ok": "", "oom": "yellow", "skipped": "dim", "wrong": "bold red", "timeout": "red", "error": "red"}


def pivot_text(frame: pd.DataFrame, metric: str = "time_ms") -> Text:
    """Return the newest row of each cell as tables, styled for a terminal. Print them with `show`."""
    return text(pivot(frame, metric))


def show(report: Text, console: Console) -> None:
    """Print without breaking or cutting a line, even if the console is narrow."""
    console.print(report, soft_wrap=True)


def text(report: PivotReport) -> Text:
    """Return the report as aligned columns with styles."""
    return writer.as_text(_document(report))


def markdown(report: PivotReport) -> str:
    """Return the report as Markdown."""
    return writer.as_markdown(_document(report))


def _document(report: PivotReport) -> writer.TextDocument:
    tables = [
        writer.TextTable(
            (*table.keys, *table.columns),
            [(*line.keys, *(_styled_cell(cell, report) for cell in line.cells)) for line in table.lines],
            table.heading,
            table.notes,
        )
        for table in report.tables
    ]
    notes = [
        *(Text(line, "dim") for line in report.legend),
        *(Text(failure.text, _STYLES.get(failure.status, "")) for failure in report.failures),
        *writer.warning_notes(report.warnings),
    ]
    return writer.TextDocument(tables, report.caption, notes=notes)


def _styled_cell(cell: PivotCell | None, report: PivotReport) -> Text:
    if cell is None:
        return Text(MISSING, "dim")
    return Text(cell.text(report.metric), "green" if cell.ratio == 1 else _STYLES.get(cell.status, ""))


def comma_separated(report: PivotReport) -> str:
    """Return one CSV table of all tables.

    A variant has two columns: the full number or a status, and the ratio. The last column holds notes.
    """
    facts = list(dict.fromkeys(name for table in report.tables for name in table.facts))
    keys = list(dict.fromkeys(name for table in report.tables for name in table.keys if name not in facts))
    variants = list(dict.fromkeys(name for table in report.tables for name in table.columns))
    columns = [*facts, *keys]
    for variant in variants:
        columns += [f"{variant} {report.metric.name}", f"{variant} x"]
    rows: list[list[str | float | None]] = []
    for table in report.tables:
        for line in table.lines:
            named = {**table.facts, **dict(zip(table.keys, line.keys, strict=True))}
            cells = dict(zip(table.columns, line.cells, strict=True))
            row: list[str | float | None] = [named.get(name) for name in (*facts, *keys)]
            for variant in variants:
                cell = cells.get(variant)
                row += [None, None] if cell is None else [cell.status if cell.value is None else cell.value, cell.ratio]
            notes = [f"{variant}: {_csv_note(cell)}" for variant, cell in cells.items() if cell and _csv_note(cell)]
            rows.append([*row, "; ".join(notes)])
    for warning in report.warnings:
        rows.append([*[None] * len(columns), f"Warning: {warning}"])
    return writer.as_csv([*columns, "notes"], rows)


def _csv_note(cell: PivotCell) -> str:
    if cell.status != "ok":
        return f"{cell.status}, {cell.reason}"
    names = {
        INTERPRETED: "interpreted", SINGLE_PASS: "one pass", HOST_BOUND: "host-bound", THROTTLED: "throttled",
        GRAPH_MEMORY: "with graph_gib", BELOW_FLOOR: "faster than its floor",
    }  # fmt: skip
    words = [names[mark] for mark in cell.mark + cell.remarks]
    if (ratio := cell.interleaved_ratio) is not None:
        words.insert(0, f"{ratio.value!r}x interleaved, {ratio.low!r} to {ratio.high!r}")
    return ", ".join(words)
