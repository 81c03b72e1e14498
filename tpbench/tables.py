"""The table that every command prints, and its text, Markdown and CSV. Pages render it with a template.

The maker of a table makes its texts safe to print (`tpbench.suggestions.printable`). The renderers escape what has a
meaning in their format.
"""

import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from tpbench.settings import spelled
from tpbench.suggestions import printable

MISSING = "-"
"""Text of a value that does not exist."""
UNDECIDED = "?"
"""Mark of a ratio whose interval includes a tie."""
STYLES = {"best": "green", "bad": "red", "dim": "dim", "warning": "bold yellow"}
"""Kinds of a cell or a note, with their styles on a terminal. A page has a CSS class for each."""

_NUMBER = re.compile(
    r"""[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?
    (?:[x%]|\ (?:[A-Za-z]{1,3}|\S+/s|bytes))?[^\w\s]*   # a unit, then marks
    (?:,?\ (?:to\ )?[^A-Za-z\s].*)?""",  # a ratio in brackets, an error or another number
    re.VERBOSE,
)
"""A number as tables print it, such as `0.303 ms (1.00x)`, and no words (`3 steps`)."""
_MARKDOWN = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[\\`*{}\[\]#~$|]|:(?=//)|(?<=\bwww)\.")
_FORMULA = tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")  # also the full-width signs, which some spreadsheets accept


@dataclass(frozen=True)
class TableCell:
    """A text of a table, and what lies behind it."""

    text: str
    value: float | str | None = None
    """CSV has it in place of the text: for example the number with all digits, by which a page sorts."""
    kind: str = ""
    """A name of `STYLES`, or nothing."""
    ratio: tuple[float | None, ...] = ()
    """How many times worse than the best cell of its row, with an interval. CSV has a column of each."""
    note: str = ""
    """Words that CSV adds about the number. Text and pages have marks instead."""
    hover: str = ""
    """Text that a page shows under the mouse."""
    anchor: str = ""
    """Name by which a link to a page finds the cell."""

    @property
    def sort_value(self) -> float | None:
        """The number that a page adds to the text, or None if the text is enough."""
        is_finite = isinstance(self.value, (int, float)) and math.isfinite(self.value)
        return self.value if is_finite and self.text != str(self.value) else None  # type: ignore[return-value]


@dataclass(frozen=True)
class Table:
    """Rows of texts under a heading. A table without columns consists of its heading and notes."""

    heading: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[TableCell | str]] = ()
    facts: Mapping[str, float | str] = field(default_factory=dict)
    """Values that hold for all rows, by name: further columns of a CSV file."""
    notes: Sequence[str] = ()
    keys: int = 0
    """How many leading columns say what a row is about."""
    quantity: str = ""
    """The metric of all other columns. CSV then has four columns for each: its number, its ratio, and the interval."""

    @property
    def cells(self) -> list[list[TableCell]]:
        """The rows, with a `TableCell` for each text."""
        return [[item if isinstance(item, TableCell) else TableCell(item) for item in row] for row in self.rows]

    @property
    def texts(self) -> list[list[str]]:
        """The text of each cell, row by row."""
        return [[cell.text for cell in row] for row in self.cells]

    @property
    def numeric(self) -> list[bool]:
        """True for each column with a number in some cell. Such columns are aligned to the right."""
        return [any(map(_NUMBER.fullmatch, texts)) for _, *texts in zip(self.columns, *self.texts, strict=True)]


@dataclass(frozen=True)
class Document:
    """The output of a command: tables, and the sentences before and after them."""

    tables: Sequence[Table]
    caption: str = ""
    notes: Sequence[TableCell | str] = ()
    warnings: Sequence[str] = ()


def value_text(value: Any) -> str:
    """Return a value as a command line spells it."""
    return MISSING if value is None or value != value else short_text(spelled(value), 60)


def value_item(value: Any) -> float | str:
    """Return a number of Python, also of one of numpy, and any other value as a text that is safe to print."""
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else value_text(value)


def value_cell(value: Any) -> TableCell:
    """Return the cell of a value, with the number behind its text."""
    return TableCell(value_text(value), value_item(value))


def number_cell(value: float | None, write: Callable[[float], str], mark: str = "") -> TableCell:
    """Return the cell of a number that `write` makes a text of, before a mark, or of a missing value."""
    return TableCell(MISSING) if value is None else TableCell(write(value) + mark, float(value))


def short_text(text: str, limit: int) -> str:
    """Return a text that is safe to print. If letters are missing, a hash tells it from other long texts."""
    line = printable(text, limit)
    return line if line == text else f"{line} ~{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:4]}"


def as_text(document: Document) -> Text:
    """Return a document with aligned columns and the styles of a terminal. `plain` of the result has no styles."""
    lines = [Text(document.caption, "dim"), Text()] if document.caption else []
    for table in document.tables:
        if table.heading:
            lines.append(Text(table.heading, "bold"))
        lines += [*_aligned(table), *(Text(note, "dim") for note in table.notes), Text()]
    lines += [Text(note.text, STYLES.get(note.kind, "")) for note in _notes(document)]
    while lines and not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


def aligned_lines(columns: Sequence[str], rows: Sequence[Sequence[TableCell | str]]) -> list[str]:
    """Return the lines of a table without styles, of which the first has the names of the columns."""
    return [line.plain for line in _aligned(Table("", columns, rows))]


def _notes(document: Document) -> list[TableCell]:
    """Return the notes of a document, its warnings last."""
    notes = [note if isinstance(note, TableCell) else TableCell(note) for note in document.notes]
    return [*notes, *(TableCell(f"Warning: {warning}", kind="warning") for warning in document.warnings)]


def _aligned(table: Table) -> list[Text]:
    """Return the lines of a table: words to the left, numbers to the right."""
    rows = [[Text(name, "bold") for name in table.columns]] if table.columns else []
    rows += [[Text(cell.text, STYLES.get(cell.kind, "")) for cell in row] for row in table.cells]
    widths = [max(map(cell_len, texts)) for texts in zip(table.columns, *table.texts, strict=True)]
    lines, numeric = [], table.numeric
    for words in rows:
        for at, word in enumerate(words):
            word.align("right" if numeric[at] else "left", widths[at])
        lines.append(Text("  " if table.heading else "") + Text("  ").join(words))
        lines[-1].rstrip()
    return lines


def as_markdown(document: Document) -> str:
    """Return a document for a README, an issue or a pull request."""
    parts = [_markdown(document.caption)]
    for table in document.tables:
        parts.append(table.heading and f"**{_markdown(table.heading)}**")
        if table.columns:
            names, *lines = (f"| {' | '.join(map(_markdown, row))} |" for row in (table.columns, *table.texts))
            rules = " | ".join("---:" if numeric else ":---" for numeric in table.numeric)
            parts.append("\n".join([names, f"| {rules} |", *lines]))
        parts.append(_bullets(table.notes))
    parts.append(_bullets([note.text for note in _notes(document)]))
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown(text: str) -> str:
    """Return Markdown that renders as `text`, also inside a table. Names such as `a_b` stay without a backslash."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(lambda match: f"\\{match.group()}", text)


def _bullets(notes: Sequence[str]) -> str:
    return "\n".join(f"- {_markdown(note)}" for note in notes)


def as_csv(document: Document) -> str:
    """Return one CSV table of all tables: their facts, their keys, then the other columns, without empty ones.

    With a `quantity` a column becomes up to four. The last column has the notes of cells and the document's warnings.
    """
    tables = document.tables
    rows = [{name: _csv_item(value) for name, value in values.items()} for table in tables for values in _values(table)]
    if any(table.quantity for table in tables):
        rows += [{"notes": f"Warning: {warning}"} for warning in document.warnings]
    leading = [name for table in tables for name in table.facts]
    leading += [name for table in tables for name in table.columns[: table.keys]]
    names = dict.fromkeys([*leading, *(name for row in rows for name in row if name != "notes"), "notes"])
    columns = [name for name in names if any(row.get(name) for row in rows)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(_csv_item, columns))
    writer.writerows([row.get(name, "") for name in columns] for row in rows)
    return out.getvalue()


def _values(table: Table) -> list[dict[str, float | str]]:
    """Return the values of each row by the names of their CSV columns. A cell without a value has its text."""
    lines = []
    for cells in table.cells:
        values: dict[str, float | str] = {**table.facts}
        for at, (column, cell) in enumerate(zip(table.columns, cells, strict=True)):
            is_quantity = bool(table.quantity) and at >= table.keys
            name = f"{column} {table.quantity}" if is_quantity else column
            values[name] = cell.text if cell.value is None else cell.value
            if is_quantity:
                ratios = zip(("x", "x low", "x high"), cell.ratio or (None,) * 3, strict=True)
                values |= {f"{column} {end}": MISSING if ratio is None else ratio for end, ratio in ratios}
        notes = [f"{column}: {cell.note}" for column, cell in zip(table.columns, cells, strict=True) if cell.note]
        lines.append(values | {"notes": "; ".join(notes)})
    return lines


def _csv_item(value: float | str) -> str:
    """Return what CSV has of a value: a number with all digits, nothing if it is missing, and never a formula."""
    text = "" if value == MISSING else str(value)
    return f"'{text}" if isinstance(value, str) and text.startswith(_FORMULA) else text


def as_json(document: Document) -> str:
    """Return the rows of all tables as objects, with all digits of their numbers and without missing values.

    Infinite numbers and NaN, which JSON doesn't have, are texts.
    """
    objects = [
        {
            name: value if isinstance(value, str) or math.isfinite(value) else str(value)
            for name, value in values.items()
            if value not in (MISSING, "")
        }
        for table in document.tables
        for values in _values(table)
    ]
    return json.dumps(objects, indent=2) + "\n"
