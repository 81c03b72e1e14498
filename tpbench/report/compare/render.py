"""The result of a comparison as text, Markdown, CSV or HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tpbench import tables
from tpbench.report.analysis.metrics import counted
from tpbench.report.compare.changes import FAILS, INCOMPARABLE, CellChange, Comparison, verdict_words
from tpbench.report.compare.method import method
from tpbench.suggestions import printable
from tpbench.tables import MISSING, Document, Table, TableCell

COLUMNS = ("cell", "verdict", "ratio", "95% interval", "before", "after", "rows", "p", "note")


def summary(comparison: Comparison) -> str:
    """Return how many cells were compared, with each verdict, and how many were not."""
    decided = comparison.decided
    others = [each for each in comparison.changes if each not in decided]
    sentence = f"{counted(len(decided), 'cell')} compared in {comparison.metric.name}"
    if decided:
        sentence += f": {_counted(decided)}"
    return sentence + (f"; not compared: {_counted(others)}" if others else "")


def _counted(changes: Sequence[CellChange]) -> str:
    words = Counter(each.verdict if each.verdict != INCOMPARABLE else "different conditions" for each in changes)
    return ", ".join(f"{count} {word}" for word, count in words.most_common())


def text(comparison: Comparison) -> str:
    """Return aligned columns, failures first."""
    return f"{tables.as_text(_document(comparison)).plain}\n"


def markdown(comparison: Comparison) -> str:
    """Return a table for an issue or a pull request."""
    return tables.as_markdown(_document(comparison))


def _document(comparison: Comparison) -> Document:
    shared = shared_notes(comparison)
    rows = [_texts(each, comparison, shared) for each in _sorted(comparison)]
    notes = [*_shared_sentence(shared), *map(_sentence, method(comparison))]
    return Document([Table("", COLUMNS, rows)], summary(comparison), notes)


def shared_notes(comparison: Comparison) -> list[str]:
    """Return the notes that all compared cells have. A table says them once."""
    noted = [each.notes for each in comparison.changes if each.difference]
    return [note for note in noted[0] if all(note in notes for notes in noted)] if len(noted) > 1 else []


def _shared_sentence(shared: Sequence[str]) -> list[str]:
    return [_sentence(f"All compared cells: {'; '.join(map(printable, shared))}")] if shared else []


def _sentence(words: str) -> str:
    return f"{words}."


def _texts(change: CellChange, comparison: Comparison, shared: Sequence[str]) -> list[str]:
    ratio = change.ratio
    bounded = ratio is not None and ratio.low is not None and ratio.high is not None
    values = [MISSING if value is None else comparison.metric.write(value) for value in (change.before, change.after)]
    return [
        printable(change.name),
        change.verdict,
        f"{ratio.value:.3f}" if ratio else MISSING,
        f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio and bounded else MISSING,
        *values,
        f"{change.rows[0]}, {change.rows[1]}" if ratio else MISSING,
        MISSING if change.p is None else f"{change.p:.2g}",
        printable("; ".join(note for note in change.notes if note not in shared or not change.difference)),
    ]


def comma_separated(comparison: Comparison) -> str:
    """Return numbers with all digits."""
    name = comparison.metric.name
    columns = [
        "cell", f"before {name}", f"after {name}", "ratio", "low", "high", "p", "verdict", "note",
        "rows before", "rows after",
    ]  # fmt: skip
    rows = []
    for each in comparison.changes:
        ratio = (each.ratio.value, each.ratio.low, each.ratio.high) if each.ratio else (None, None, None)
        name, note = printable(each.name), printable(each.note)
        rows.append([name, each.before, each.after, *ratio, each.p, each.verdict, note, *each.rows])
    return tables.csv_text(columns, rows)


def page(comparison: Comparison) -> str:
    """Return a self-contained HTML page."""
    from tpbench.report.page.template import render_page

    _, _, bad, good = verdict_words(comparison.metric)
    kinds = {bad: "bad", FAILS: "bad", good: "best"}
    shared = shared_notes(comparison)
    rows: list[list[TableCell | str]] = []
    for each in _sorted(comparison):
        name, verdict, *shown, note = _texts(each, comparison, shared)
        ratio = each.ratio
        numbers = (
            ratio.value if ratio else None, ratio.low if ratio else None, each.before, each.after,
            sum(each.rows), each.p,
        )  # fmt: skip
        values = [
            TableCell(text) if text == MISSING else TableCell(text, value)
            for text, value in zip(shown, numbers, strict=True)
        ]
        rows.append([name, TableCell(verdict, kind=kinds.get(verdict, "")), *values, note])
    return render_page(
        "comparison.html.j2",
        title="tpbench comparison",
        summary=f"{summary(comparison)}.",
        table=Table("comparison", COLUMNS, rows),
        method=" ".join([*_shared_sentence(shared), *map(_sentence, method(comparison))]),
    )


def _sorted(comparison: Comparison) -> list[CellChange]:
    """Sort failures first, then by the size of the ratio, the worst first."""
    worse = comparison.metric.better or -1
    return sorted(
        comparison.changes,
        key=lambda each: (not each.fails(), each.ratio is None, worse * (each.ratio.value if each.ratio else 0)),
    )
