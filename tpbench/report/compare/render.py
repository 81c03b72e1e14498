"""The result of a comparison as text, Markdown, CSV or HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tpbench.report import writer
from tpbench.report.compare.changes import FAILS, FASTER, SLOWER, CellChange, explain
from tpbench.report.escape import printable
from tpbench.report.metric import number
from tpbench.report.records import MISSING

COLUMNS = ("cell", "verdict", "ratio", "95% interval", "before", "after", "p", "note")


def summary(changes: Sequence[CellChange]) -> str:
    """Return how many cells have each verdict."""
    counted = Counter(change.verdict for change in changes)
    return f"{len(changes)} cells: " + ", ".join(f"{count} {verdict}" for verdict, count in counted.most_common())


def text(changes: Sequence[CellChange], clock: str, threshold: float) -> str:
    """Return aligned columns, failures first."""
    return f"{writer.as_text(_document(changes, clock, threshold)).plain}\n"


def markdown(changes: Sequence[CellChange], clock: str, threshold: float) -> str:
    """Return a table for an issue or a pull request."""
    return writer.as_markdown(_document(changes, clock, threshold))


def _document(changes: Sequence[CellChange], clock: str, threshold: float) -> writer.TextDocument:
    table = writer.TextTable(COLUMNS, [*map(_texts, _sorted(changes))], left=("cell", "verdict", "note"))
    return writer.TextDocument([table], paragraphs=[summary(changes), _method(clock, threshold)])


def _texts(change: CellChange) -> list[str]:
    ratio = change.ratio
    bounded = ratio is not None and ratio.low is not None and ratio.high is not None
    return [
        printable(change.name),
        change.verdict,
        f"{ratio.value:.3f}" if ratio else MISSING,
        f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio and bounded else MISSING,
        *(MISSING if value is None else f"{number(value)} ms" for value in (change.before_ms, change.after_ms)),
        MISSING if change.p is None else f"{change.p:.2g}",
        printable(change.note),
    ]


def _method(clock: str, threshold: float) -> str:
    return f"{clock}; {explain(threshold)}."


def comma_separated(changes: Sequence[CellChange], clock: str, threshold: float) -> str:
    """Return numbers with all digits."""
    columns = ["cell", f"before {clock}", f"after {clock}", "ratio", "low", "high", "p", "verdict", "note"]
    rows = []
    for each in changes:
        ratio = (each.ratio.value, each.ratio.low, each.ratio.high) if each.ratio else (None, None, None)
        rows.append(
            [printable(each.name), each.before_ms, each.after_ms, *ratio, each.p, each.verdict, printable(each.note)]
        )
    return writer.as_csv(columns, rows)


def page(changes: Sequence[CellChange], clock: str, threshold: float) -> str:
    """Return a self-contained HTML page."""
    from tpbench.report.page.cells import MISSING_CELL, PageCell, PageTable
    from tpbench.report.page.template import render_page

    kinds = {SLOWER: "bad", FAILS: "bad", FASTER: "best"}
    rows = []
    for each in _sorted(changes):
        name, verdict, *shown, note = _texts(each)
        ratio = each.ratio
        numbers = (ratio.value if ratio else None, ratio.low if ratio else None, each.before_ms, each.after_ms, each.p)
        values = [
            MISSING_CELL if text == MISSING else PageCell(text, value)
            for text, value in zip(shown, numbers, strict=True)
        ]
        rows.append([PageCell(name), PageCell(verdict, kind=kinds.get(verdict, "")), *values, PageCell(note)])
    return render_page(
        "comparison.html.j2",
        title="tpbench comparison",
        summary=summary(changes),
        table=PageTable("comparison", COLUMNS, rows, keys=2),
        method=_method(clock, threshold),
    )


def _sorted(changes: Sequence[CellChange]) -> list[CellChange]:
    """Sort failures first, then by the size of the ratio."""
    return sorted(
        changes, key=lambda each: (not each.fails(), each.ratio is None, -(each.ratio.value if each.ratio else 0))
    )
