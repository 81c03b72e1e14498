"""The table that every command prints, and its text, Markdown and CSV. Pages render it with a template.

The maker of a table makes its texts safe to print (`tpbench.suggestions.printable`). The renderers escape what has a
meaning in their format.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import rich.table
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

MISSING = "-"
"""Text of a value that does not exist."""
STYLES = {"best": "green", "bad": "red", "dim": "dim", "warning": "bold yellow"}
"""Kinds of a cell or a note, with their styles on a terminal. A page has a CSS class for each."""

_NUMBER = re.compile(
    r"""[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?
    (?:[x%]|\ (?:[A-Za-z]{1,3}|\S+/s|bytes))?[^\w\s]*   # a unit, then marks
    (?:,?\ (?:to\ )?[^A-Za-z\s].*)?""",  # a ratio in brackets, an error or another number
    re.VERBOSE,
)
_MARKDOWN = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[\\`*{}\[\]#~$|]|:(?=//)|(?<=\bwww)\.")
_FORMULA = tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")  # also the full-width signs, which some spreadsheets accept
_WIDEST = 100_000
"""Columns of the console that aligns a table. Rich would break or cut the lines of a narrow one."""


@dataclass(frozen=True)
class TableCell:
    """A text of a table, and what lies behind it."""

    text: str
    value: float | str | None = None
    """CSV has it in place of the text: for example the number with all digits, by which a page sorts."""
    kind: str = ""
    """A name of `STYLES`, or nothing."""
    ratio: float | None = None
    """How many times worse than the best cell of its row. CSV has a column of these."""
    note: str = ""
    """Words that CSV adds about the number. Text and pages have marks instead."""
    detail: str = ""
    """Text in a second line of a page."""


@dataclass(frozen=True)
class Table:
    """Rows of texts under a heading. A table without columns consists of its heading and notes."""

    heading: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[TableCell | str]] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """Values that hold for all rows, by name: further columns of a CSV file."""
    notes: Sequence[str] = ()
    keys: int = 0
    """How many leading columns say what a row is about."""
    quantity: str = ""
    """The metric of all other columns. CSV then has two columns for each of them: its number and its ratio."""

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
        texts = self.texts
        return [any(is_number(row[at]) for row in texts) for at in range(len(self.columns))]

    def sort_value(self, cell: TableCell) -> float | None:
        """Return the number that a page adds to the text of a cell, or None if the text is enough."""
        if not isinstance(cell.value, (int, float)) or not math.isfinite(cell.value):
            return None
        return None if cell.text == str(cell.value) else cell.value


@dataclass(frozen=True)
class Document:
    """The output of a command: tables, and the sentences before and after them."""

    tables: Sequence[Table]
    caption: str = ""
    notes: Sequence[TableCell | str] = ()
    warnings: Sequence[str] = ()


def is_number(text: str) -> bool:
    """Return true for a number as tables print it, such as `0.303 ms (1.00x)`, and false for words (`3 steps`)."""
    return _NUMBER.fullmatch(text) is not None


def number_cell(value: float | None, write: Callable[[float], str]) -> TableCell:
    """Return the cell of a number that `write` makes a text of, or of a missing value."""
    return TableCell(MISSING) if value is None else TableCell(write(value), float(value))


def show(document: Document, console: Console) -> None:
    """Print a document without breaking or cutting a line.

    On a terminal, a table that is wider continues below, with its leading columns again.
    """
    console.print(as_text(document, console.width if console.is_terminal else None), soft_wrap=True)


def as_text(document: Document, width: int | None = None) -> Text:
    """Return a document with aligned columns and the styles of a terminal. `plain` of the result has no styles.

    Tables that are wider than `width` are divided into blocks of columns.
    """
    lines = [Text(document.caption, "dim"), Text()] if document.caption else []
    for table in document.tables:
        if table.heading:
            lines.append(Text(table.heading, "bold"))
        blocks = _blocks(table, width) if width else [table]
        for at, block in enumerate(blocks):
            lines += [Text()] if at else []
            lines += _aligned(block) if block.columns else []
        lines += [*(Text(note, "dim") for note in table.notes), Text()]
    lines += [Text(note.text, STYLES.get(note.kind, "")) for note in _notes(document)]
    while lines and not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


def _blocks(table: Table, width: int) -> list[Table]:
    """Divide the columns of a table into tables of at most that width. Each begins with the leading columns."""
    texts = [*table.texts, list(table.columns)]
    widths = [max(cell_len(row[at]) for row in texts) + 2 for at in range(len(table.columns))]
    keys = list(range(table.keys or 1))
    blocks = [[*keys]]
    for at in range(len(keys), len(widths)):
        if sum(widths[index] for index in [*blocks[-1], at]) > width and len(blocks[-1]) > len(keys):
            blocks.append([*keys])
        blocks[-1].append(at)
    if len(blocks) < 2:
        return [table]
    return [
        replace(
            table, columns=[table.columns[at] for at in block], rows=[[row[at] for at in block] for row in table.rows]
        )
        for block in blocks
    ]


def aligned_lines(columns: Sequence[str], rows: Sequence[Sequence[TableCell | str]]) -> list[str]:
    """Return the lines of a table without styles, of which the first has the names of the columns."""
    return [line.plain for line in _aligned(Table("", columns, rows))]


def _notes(document: Document) -> list[TableCell]:
    """Return the notes of a document, its warnings last."""
    notes = [note if isinstance(note, TableCell) else TableCell(note) for note in document.notes]
    return [*notes, *(TableCell(f"Warning: {warning}", kind="warning") for warning in document.warnings)]


def _aligned(table: Table) -> list[Text]:
    """Return the lines of a table: words to the left, numbers to the right."""
    grid = rich.table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name, numeric in zip(table.columns, table.numeric, strict=True):
        grid.add_column(Text(name), justify="right" if numeric else "left", no_wrap=True)
    for row in table.cells:
        grid.add_row(*(Text(cell.text, STYLES.get(cell.kind, "")) for cell in row))
    segments = Console(width=_WIDEST, file=io.StringIO()).render(grid)
    indent = "  " if table.heading else ""
    lines = []
    for line in Text.assemble(*((segment.text, segment.style or "") for segment in segments)).split():
        line.rstrip()
        lines.append(Text(indent) + line)
    return lines


def as_markdown(document: Document) -> str:
    """Return a document for a README, an issue or a pull request."""
    parts = [_markdown(document.caption)] if document.caption else []
    for table in document.tables:
        parts += [f"**{_markdown(table.heading)}**"] if table.heading else []
        parts += [_markdown_table(table)] if table.columns else []
        parts += _bullets(table.notes)
    parts += _bullets([note.text for note in _notes(document)])
    return "\n\n".join(parts) + "\n"


def _markdown(text: str) -> str:
    """Return Markdown that renders as `text`, also inside a table. Names such as `a_b` stay without a backslash."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(lambda match: f"\\{match.group()}", text)


def _markdown_table(table: Table) -> str:
    lines = [f"| {' | '.join(map(_markdown, row))} |" for row in (table.columns, *table.texts)]
    rules = ["---:" if numeric else ":---" for numeric in table.numeric]
    return "\n".join([lines[0], f"| {' | '.join(rules)} |", *lines[1:]])


def _bullets(notes: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {_markdown(note)}" for note in notes)] if notes else []


def as_csv(document: Document) -> str:
    """Return one CSV table of all tables: their facts, their keys, then the other columns, without empty ones.

    With a `quantity` a column becomes two, and the last column has the notes of cells and the document's warnings.
    """
    tables = document.tables
    rows = [_csv_row(table, row) for table in tables for row in table.cells]
    notes = ["notes"] if any(table.quantity for table in tables) else []
    if notes:
        rows += [{"notes": TableCell(f"Warning: {warning}")} for warning in document.warnings]
    leading = [name for table in tables for name in table.facts]
    leading += [name for table in tables for name in table.columns[: table.keys]]
    others = [name for table in tables for column in table.columns[table.keys :] for name in _csv_names(table, column)]
    columns = list(dict.fromkeys([*leading, *others, *notes]))
    columns = [name for name in columns if any(name in row and _csv_item(row[name]) for row in rows)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(_csv_item, map(TableCell, columns)))
    writer.writerows([_csv_item(row.get(name, TableCell(""))) for name in columns] for row in rows)
    return out.getvalue()


def _csv_names(table: Table, column: str) -> list[str]:
    return [f"{column} {table.quantity}", f"{column} x"] if table.quantity else [column]


def _csv_row(table: Table, cells: Sequence[TableCell]) -> dict[str, TableCell]:
    """Return the cells of a row by the names of their CSV columns."""
    named = {name: TableCell(text) for name, text in table.facts.items()}
    named |= dict(zip(table.columns[: table.keys], cells, strict=False))
    others = list(zip(table.columns[table.keys :], cells[table.keys :], strict=True))
    for column, cell in others:
        items = (cell, TableCell("", cell.ratio))
        named |= dict(zip(_csv_names(table, column), items, strict=False))
    notes = [f"{column}: {cell.note}" for column, cell in others if cell.note]
    return named | ({"notes": TableCell("; ".join(notes))} if notes else {})


def _csv_item(cell: TableCell) -> str:
    """Return what CSV has of a cell: a number with all digits, nothing if it is missing, and never a formula."""
    item = cell.text if cell.value is None else cell.value
    if isinstance(item, str):
        return "" if item == MISSING else f"'{item}" if item.startswith(_FORMULA) else item
    return str(item)


def as_json(document: Document) -> str:
    """Return the rows of all tables as objects, with all digits of their numbers and without missing values."""
    objects = []
    for table in document.tables:
        for row in table.cells:
            values = [
                (name, cell.text if cell.value is None else cell.value) for name, cell in _csv_row(table, row).items()
            ]
            objects.append({name: value for name, value in values if value not in (MISSING, "")})
    return json.dumps(objects, indent=2) + "\n"
