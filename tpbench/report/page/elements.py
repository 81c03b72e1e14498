"""Pieces of HTML. All text comes in as text and is escaped here, and nowhere else."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tpbench.report.escape import plain
from tpbench.report.metric import number


@dataclass(frozen=True)
class Value:
    """What a table's cell shows, and what it is sorted by."""

    text: str
    sort: float | None = None
    """A number in full; text sorts as text."""
    kind: str = ""
    """A word for its looks: best, bad, dim."""


NOTHING = Value("-", None, "dim")


def quantity(value: float | None, unit: str = "", kind: str = "") -> Value:
    """A number with its unit."""
    if value is None:
        return NOTHING
    return Value(f"{number(value)} {unit}".rstrip(), float(value), kind)


def share(value: float | None) -> Value:
    """A share as a percentage."""
    return NOTHING if value is None else Value(f"{100 * value:.1f}%", float(value))


def words(value: object, limit: int = 200) -> Value:
    """Text of a row, made harmless; numbers in it sort as numbers."""
    if value is None:
        return NOTHING
    text = plain(str(value).lower() if isinstance(value, bool) else str(value), limit)
    return Value(text, float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None)


def text(value: str) -> str:
    """Text as HTML."""
    return html.escape(value)


def paragraph(content: str, kind: str = "") -> str:
    """Text as a paragraph."""
    return f"<p{_class(kind)}>{text(content)}</p>"


def bullets(items: Iterable[str]) -> str:
    """Texts as a list."""
    return "<ul>" + "".join(f"<li>{text(item)}</li>" for item in items) + "</ul>"


def table(heads: Sequence[str], rows: Iterable[Sequence[Value]], name: str, *, keys: int = 1) -> str:
    """A table that the page's script makes sortable and filterable. The first `keys` columns are names, not values."""
    rows = list(rows)
    kinds = ["" if any(row[at].sort is not None for row in rows) else "word" for at in range(min(keys, len(heads)))]
    kinds += [""] * (len(heads) - len(kinds))
    lines = ["<tr>" + "".join(_cell(value, kinds[at]) for at, value in enumerate(row)) + "</tr>" for row in rows]
    head = "".join(f'<th scope="col"{_class(kinds[at])}>{text(name)}</th>' for at, name in enumerate(heads))
    return (
        f'<div class="sheet" data-name="{text(name)}"><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{chr(10).join(lines)}</tbody></table></div></div>"
    )


def _cell(value: Value, kind: str) -> str:
    sort = "" if value.sort is None or not math.isfinite(value.sort) else f' data-v="{value.sort!r}"'
    return f"<td{sort}{_class(f'{kind} {value.kind}'.strip())}>{text(value.text)}</td>"


def folded(summary: str, content: str) -> str:
    """Content that opens on a click."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def figure(svg: str, caption: str) -> str:
    """A picture (already an element) with its caption, which also is what a screen reader says."""
    labelled = svg.replace("<svg ", f'<svg role="img" aria-label="{text(caption)}" ', 1)
    return f'<figure><figcaption>{text(caption)}</figcaption><div class="scroll">{labelled}</div></figure>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
