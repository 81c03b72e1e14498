"""Tables of the HTML report as plain data. The templates escape all text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpbench.report.metric import number
from tpbench.results.printable import printable


class PageCell(NamedTuple):
    """Text of a table's cell, and the number by which it is sorted."""

    text: str
    number: float | None = None
    """A number with all digits. Cells without a number are sorted by their text."""
    kind: str = ""
    """CSS class: best, bad or dim."""


@dataclass(frozen=True)
class PageTable:
    """A table that the page's script makes sortable and filterable."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[PageCell]]
    keys: int = 1
    """Number of the first columns that hold names and not values."""

    @property
    def classes(self) -> list[str]:
        """The CSS class of each column: names that are no numbers are aligned to the left."""
        return [
            "word" if at < self.keys and all(row[at].number is None for row in self.rows) else ""
            for at in range(len(self.columns))
        ]


MISSING_CELL = PageCell("-", None, "dim")


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
