"""A report as text, Markdown or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

import pandas as pd
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tpbench.report import escape
from tpbench.report.pivot import pivot
from tpbench.report.study import Sheet
from tpbench.report.table import NEVER_RUN, Cell, Report, Table, heading

_STYLES = {"ok": "", "oom": "yellow", "skipped": "dim", "wrong": "bold red", "timeout": "red", "error": "red"}


def pivot_text(frame: pd.DataFrame, metric: str = "time_ms") -> Text:
    """The newest row of each cell as tables: styled for a terminal, and `.plain` for anything else. See `show`."""
    return text(pivot(frame, metric))


def show(report: Text, console: Console) -> None:
    """Print without breaking or cutting a line, however narrow the console or a pipe claims to be."""
    console.print(report, soft_wrap=True)


def text(report: Report) -> Text:
    """Aligned columns. Rich's own tables cut numbers where there is little room; here a long line stays a line."""
    lines = [Text(report.caption, "dim"), Text("")]
    for table in report.tables:
        lines += [Text(table.heading, "bold"), *_table(table, report), Text("")]
    lines += [Text(line, "dim") for line in report.legend]
    lines += [Text(failure.text, _STYLES.get(failure.status, "")) for failure in report.failures]
    lines += [Text(f"Warning: {warning}", "bold yellow") for warning in report.warnings]
    while lines and not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


def _table(table: Table, report: Report) -> list[Text]:
    grid = [[Text(name, "bold") for name in (*table.keys, *table.columns)]]
    for line in table.lines:
        cells = [Text(_text(cell, report), _style(cell)) for cell in line.cells]
        grid.append([*map(Text, line.keys), *cells])
    return _aligned(grid)


def _aligned(grid: list[list[Text]]) -> list[Text]:
    widths = [max(cell_len(row[index].plain) for row in grid) for index in range(len(grid[0]))]
    lines = []
    for row in grid:
        padded = [Text(" " * (width - cell_len(item.plain))) + item for item, width in zip(row, widths, strict=True)]
        lines.append(Text("  ") + Text("  ").join(padded))
    return lines


def _text(cell: Cell | None, report: Report) -> str:
    return cell.text(report.metric) if cell else NEVER_RUN


def _style(cell: Cell | None) -> str:
    if cell is None:
        return "dim"
    return "green" if cell.ratio == 1 else _STYLES.get(cell.status, "")


def markdown(report: Report) -> str:
    """For a README or an issue."""
    parts = [escape.markdown(report.caption)]
    for table in report.tables:
        rows = [(*line.keys, *(_text(cell, report) for cell in line.cells)) for line in table.lines]
        parts += [f"**{escape.markdown(table.heading)}**", markdown_table((*table.keys, *table.columns), rows)]
    notes = [*report.legend, *(failure.text for failure in report.failures)]
    notes += [f"Warning: {warning}" for warning in report.warnings]
    if notes:
        parts.append("\n".join(f"- {escape.markdown(note)}" for note in notes))
    return "\n\n".join(parts) + "\n"


def study_text(sheets: Sequence[Sheet]) -> Text:
    """Studies as aligned columns."""
    lines = []
    for each in sheets:
        grid = [[Text(name, "bold") for name in each.heads], *([*map(Text, line)] for line in each.lines)]
        lines += [Text(heading(each.facts), "bold"), *_aligned(grid), *(Text(note, "dim") for note in each.notes)]
        lines.append(Text(""))
    return Text("\n").join(lines[:-1])


def study_markdown(sheets: Sequence[Sheet]) -> str:
    """Studies for a README or an issue."""
    parts = []
    for each in sheets:
        parts += [f"**{escape.markdown(heading(each.facts))}**", markdown_table(each.heads, each.lines)]
        parts += [f"- {escape.markdown(note)}" for note in each.notes]
    return "\n\n".join(parts) + "\n"


def study_comma_separated(sheets: Sequence[Sheet]) -> str:
    """One CSV table of all studies."""
    heads = list(dict.fromkeys(name for each in sheets for name in (*each.facts, *each.heads)))
    out = io.StringIO()
    writer = csv.DictWriter(out, heads, restval="", lineterminator="\n")
    writer.writeheader()
    for each in sheets:
        for line in each.lines:
            found = {**each.facts, **dict(zip(each.heads, line, strict=True))}
            writer.writerow(
                {name: "" if value == NEVER_RUN else escape.csv_text(value) for name, value in found.items()}
            )
    return out.getvalue()


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, numbers to the right."""
    written = ["| " + " | ".join(map(escape.markdown, row)) + " |" for row in (heads, *rows)]
    written.insert(1, "|" + " ---: |" * len(heads))
    return "\n".join(written)


def comma_separated(report: Report) -> str:
    """One CSV table of all tables: full numbers or a status in a variant's first column, the ratio in its second."""
    facts = list(dict.fromkeys(name for table in report.tables for name in table.facts))
    keys = list(dict.fromkeys(name for table in report.tables for name in table.keys if name not in facts))
    heads = list(dict.fromkeys(name for table in report.tables for name in table.columns))
    ratios = [[f"{head} {report.metric.name}", f"{head} x"] for head in heads]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(escape.csv_text, [*facts, *keys, *(name for pair in ratios for name in pair), "notes"]))
    for table in report.tables:
        for line in table.lines:
            named = {**table.facts, **dict(zip(table.keys, line.keys, strict=True))}
            cells = dict(zip(table.columns, line.cells, strict=True))
            values = [named.get(name, "") for name in [*facts, *keys]]
            values = ["" if value == NEVER_RUN else escape.csv_text(value) for value in values]
            for head in heads:
                values += _csv_cell(cells.get(head))
            notes = [f"{head}: {_csv_note(cell)}" for head, cell in cells.items() if cell and _csv_note(cell)]
            writer.writerow([*values, escape.csv_text("; ".join(notes))])
    for warning in report.warnings:
        writer.writerow([*[""] * (len(facts) + len(keys) + 2 * len(heads)), f"Warning: {warning}"])
    return out.getvalue()


def _csv_cell(cell: Cell | None) -> list[str]:
    if cell is None:
        return ["", ""]
    if cell.value is None:
        return [escape.csv_text(cell.status), ""]
    return [repr(cell.value), "" if cell.ratio is None else repr(cell.ratio)]


def _csv_note(cell: Cell) -> str:
    if cell.status != "ok":
        return f"{cell.status}, {cell.reason}"
    if (found := cell.by_rounds) is not None:
        return f"{found.value!r}x in turns, {found.low!r} to {found.high!r}"
    return {"*": "interpreted", "^": "one pass"}.get(cell.mark, "")
