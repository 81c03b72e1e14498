"""Tables of the HTML report as plain data. The templates escape all text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from tpbench.report.numbers.metric import number
from tpbench.report.tables.writer import columns_of_numbers
from tpbench.suggestions import printable

Digits: TypeAlias = Literal["all", "hidden", "none"]


class PageCell(NamedTuple):
    """Text of a table's cell, and its number with all digits."""

    text: str
    number: float | None = None
    """None: the cell is sorted by the number at the start of its text, or by its text."""
    kind: str = ""
    """CSS class: best, bad, dim, or first for a cell whose first line is bold."""
    command: str = ""
    """Command that a button in the cell copies."""
    detail: str = ""
    """Text in a second line."""


@dataclass(frozen=True)
class PageTable:
    """A table that the page's script makes sortable and filterable."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[PageCell]]
    digits: Digits = "all"
    """Cells that carry all digits of their numbers: every cell, only cells whose text is no whole number, or none."""
    notes: Sequence[str] = ()
    """Sentences that hold for all rows."""
    keys: int = 0
    """How many leading columns say what a row is about. A phone shows such a row as a block. 0: it keeps the table."""

    @property
    def left(self) -> str:
        """The CSS classes of the columns of words, which are aligned to the left."""
        numeric = columns_of_numbers(len(self.columns), [[cell.text for cell in row] for row in self.rows])
        return " ".join(f"l{at}" for at, right in enumerate(numeric, start=1) if not right)

    def sort_number(self, cell: PageCell) -> float | None:
        """Return the number that a cell carries besides its text, or None."""
        if cell.number is None or self.digits == "none" or not math.isfinite(cell.number):
            return None
        return None if self.digits == "hidden" and cell.text == f"{cell.number:.0f}" else cell.number


MISSING_CELL = PageCell("-")


def quantity(value: float | None, unit: str = "", kind: str = "") -> PageCell:
    """Return a number with its unit."""
    if value is None:
        return MISSING_CELL
    return PageCell(f"{number(value)} {unit}".rstrip(), float(value), kind)


def percentage(value: float | None) -> PageCell:
    """Return a share as a percentage."""
    return MISSING_CELL if value is None else PageCell(f"{100 * value:.1f}%", float(value))


def words(value: object, limit: int = 200) -> PageCell:
    """Return the text of a value, made printable. Numbers are sorted as numbers."""
    if value is None:
        return MISSING_CELL
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    text = printable(str(value).lower() if isinstance(value, bool) else str(value), limit)
    return PageCell(text, float(value) if is_number else None)  # type: ignore[arg-type]
