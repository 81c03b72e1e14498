"""Tables as aligned text, Markdown and CSV. Every command that prints a table uses this module."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.cells import cell_len
from rich.text import Text

from tpbench.report.grids.records import MISSING
from tpbench.report.tables import escape

Item: TypeAlias = str | Text
"""Text that is safe to print, with or without a style for terminals."""
_NUMBER = re.compile(
    r"""[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?
    (?:[x%]|\ (?:[A-Za-z]{1,3}|\S+/s|bytes))?[^\w\s]*   # a unit, then marks
    (?:,?\ (?:to\ )?[^A-Za-z\s].*)?""",  # a ratio in brackets, an error or another number
    re.VERBOSE,
)


@dataclass(frozen=True)
class TextTable:
    """A table of texts with its heading and the notes that belong to it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Item]]
    heading: str = ""
    notes: Sequence[str] = ()


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
        lines += [Text(indent) + line for line in aligned(table.columns, table.rows)]
        lines += [*(Text(note, "dim") for note in table.notes), Text("")]
    lines += [_styled(each) for each in (*document.paragraphs, *document.notes)]
    while lines and not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


def is_number(text: str) -> bool:
    """Return true for a number as tables print it, such as `0.303 ms (1.00x)`, and false for words (`3 steps`)."""
    return _NUMBER.fullmatch(text) is not None


def columns_of_numbers(count: int, rows: Sequence[Sequence[Item]]) -> list[bool]:
    """Return for each of `count` columns whether some cell is a number. The others may be words such as OOM."""
    return [any(is_number(_plain(row[at])) for row in rows) for at in range(count)]


def aligned(columns: Sequence[str], rows: Sequence[Sequence[Item]]) -> list[Text]:
    """Return the lines of a table, the column names first: words to the left, numbers to the right.

    The width of wide characters is taken into account.
    """
    grid = [[Text(name, "bold") for name in columns], *([*map(_styled, row)] for row in rows)]
    widths = [max(cell_len(row[at].plain) for row in grid) for at in range(len(columns))]
    numeric = columns_of_numbers(len(columns), rows)
    lines = []
    for row in grid:
        padded = []
        for item, width, to_the_right in zip(row, widths, numeric, strict=True):
            padding = Text(" " * (width - cell_len(item.plain)))
            padded.append(padding + item if to_the_right else item + padding)
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
    rules = ["---:" if numeric else ":---" for numeric in columns_of_numbers(len(table.columns), table.rows)]
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
