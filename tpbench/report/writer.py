"""Tables as aligned text, Markdown and CSV. Every command that prints a table uses this module."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.cells import cell_len
from rich.text import Text

from tpbench.report import escape
from tpbench.report.records import MISSING

Item: TypeAlias = str | Text
"""Text that is safe to print, with or without a style for terminals."""


@dataclass(frozen=True)
class TextTable:
    """A table of texts with its heading and the notes that belong to it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Item]]
    heading: str = ""
    notes: Sequence[str] = ()
    left: Collection[str] = ()
    """Columns that are aligned to the left. All others are aligned to the right."""


@dataclass(frozen=True)
class TextDocument:
    """Tables with the texts before and after them."""

    tables: Sequence[TextTable]
    caption: str = ""
    paragraphs: Sequence[str] = ()
    notes: Sequence[Item] = ()


def warning_notes(warnings: Iterable[str]) -> list[Item]:
    """Return warnings as notes of a document."""
    return [Text(f"Warning: {warning}", "bold yellow") for warning in warnings]


def as_text(document: TextDocument) -> Text:
    """Return a document with aligned columns. Long lines stay whole, because rich's tables would cut numbers."""
    lines = [Text(document.caption, "dim"), Text("")] if document.caption else []
    for table in document.tables:
        if table.heading:
            lines.append(Text(table.heading, "bold"))
        indent = "  " if table.heading else ""
        lines += [Text(indent) + line for line in aligned(table.columns, table.rows, table.left)]
        lines += [*(Text(note, "dim") for note in table.notes), Text("")]
    lines += [_styled(each) for each in (*document.paragraphs, *document.notes)]
    while lines and not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


def aligned(columns: Sequence[str], rows: Iterable[Sequence[Item]], left: Collection[str] = ()) -> list[Text]:
    """Return the lines of a table, the column names first. The width of wide characters is taken into account."""
    grid = [[Text(name, "bold") for name in columns], *([*map(_styled, row)] for row in rows)]
    widths = [max(cell_len(row[at].plain) for row in grid) for at in range(len(columns))]
    lines = []
    for row in grid:
        padded = []
        for name, item, width in zip(columns, row, widths, strict=True):
            padding = Text(" " * (width - cell_len(item.plain)))
            padded.append(item + padding if name in left else padding + item)
        line = Text("  ").join(padded)
        line.rstrip()
        lines.append(line)
    return lines


def as_markdown(document: TextDocument) -> str:
    """Return a document for a README, an issue or a pull request."""
    parts = [escape.markdown(document.caption)] if document.caption else []
    for table in document.tables:
        parts += [f"**{escape.markdown(table.heading)}**"] if table.heading else []
        parts += [_markdown_table(table)] if table.columns else []
        parts += _bullets(table.notes)
    parts += [*map(escape.markdown, document.paragraphs), *_bullets(document.notes)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: TextTable) -> str:
    lines = [
        "| " + " | ".join(escape.markdown(_plain(item)) for item in row) + " |" for row in (table.columns, *table.rows)
    ]
    rules = [":---" if name in table.left else "---:" for name in table.columns]
    return "\n".join([lines[0], f"| {' | '.join(rules)} |", *lines[1:]])


def _bullets(notes: Sequence[Item]) -> list[str]:
    return ["\n".join(f"- {escape.markdown(_plain(note))}" for note in notes)] if notes else []


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """Return one CSV table. Numbers have all digits, missing values are empty, and no text is a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([_csv_item(item) for item in row] for row in (columns, *rows))
    return out.getvalue()


def _csv_item(item: str | float | None) -> str:
    if item is None or item == MISSING:
        return ""
    return escape.csv_text(item) if isinstance(item, str) else repr(item)


def _styled(item: Item) -> Text:
    return item if isinstance(item, Text) else Text(item)


def _plain(item: Item) -> str:
    return item.plain if isinstance(item, Text) else item
