"""Verdicts as text, Markdown, CSV or HTML."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence

from rich.cells import cell_len

from tpbench.report import escape
from tpbench.report.compare.verdict import FAILS, FASTER, SLOWER, Verdict, explain
from tpbench.report.metric import number
from tpbench.report.page import document, elements
from tpbench.report.page.elements import NOTHING, Value

HEADS = ("cell", "verdict", "ratio", "95% interval", "before", "after", "p", "note")


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many of each."""
    counted = Counter(verdict.verdict for verdict in verdicts)
    return f"{len(verdicts)} cells: " + ", ".join(f"{count} {word}" for word, count in counted.most_common())


def _texts(verdict: Verdict) -> list[str]:
    ratio = verdict.ratio
    interval = (
        f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio and ratio.low is not None and ratio.high is not None else "-"
    )
    return [
        escape.plain(verdict.name),
        verdict.verdict,
        f"{ratio.value:.3f}" if ratio else "-",
        interval,
        *("-" if value is None else f"{number(value)} ms" for value in (verdict.before, verdict.after)),
        "-" if verdict.p is None else f"{verdict.p:.2g}",
        escape.plain(verdict.note),
    ]


def text(verdicts: Sequence[Verdict], clock: str, threshold: float) -> str:
    """Aligned columns, what matters first."""
    grid = [list(HEADS), *map(_texts, _sorted(verdicts))]
    widths = [max(cell_len(line[column]) for line in grid) for column in range(len(HEADS))]
    lines = []
    for line in grid:
        padded = [
            item + " " * (width - cell_len(item)) if HEADS[at] in ("cell", "verdict", "note") else item.rjust(width)
            for at, (item, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join([*lines, "", summary(verdicts), f"{clock}; {explain(threshold)}.", ""])


def markdown(verdicts: Sequence[Verdict], clock: str, threshold: float) -> str:
    """For an issue or a pull request."""
    lines = [HEADS, *map(_texts, _sorted(verdicts))]
    written = ["| " + " | ".join(map(escape.markdown, line)) + " |" for line in lines]
    written.insert(1, "| :--- | :--- |" + " ---: |" * 5 + " :--- |")
    foot = [summary(verdicts), f"{clock}; {explain(threshold)}."]
    return "\n".join([*written, "", *(f"{escape.markdown(line)}\n" for line in foot)])


def comma_separated(verdicts: Sequence[Verdict], clock: str, threshold: float) -> str:
    """Full numbers."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["cell", f"before {clock}", f"after {clock}", "ratio", "low", "high", "p", "verdict", "note"])
    for each in verdicts:
        ratio = (each.ratio.value, each.ratio.low, each.ratio.high) if each.ratio else (None, None, None)
        numbers = ["" if value is None else repr(value) for value in (each.before, each.after, *ratio, each.p)]
        words = [escape.csv_text(escape.plain(word)) for word in (each.name, each.verdict, each.note)]
        writer.writerow([words[0], *numbers, *words[1:]])
    return out.getvalue()


def page(verdicts: Sequence[Verdict], clock: str, threshold: float) -> str:
    """A page of its own, as self-contained as the report's."""
    kinds = {SLOWER: "bad", FAILS: "bad", FASTER: "best"}
    rows = []
    for each in _sorted(verdicts):
        texts, ratio = _texts(each), each.ratio
        sorts = (ratio.value if ratio else None, ratio.low if ratio else None, each.before, each.after, each.p)
        values = [
            Value(shown, sort) if shown != "-" else NOTHING for shown, sort in zip(texts[2:7], sorts, strict=True)
        ]
        verdict = Value(texts[1], None, kinds.get(each.verdict, ""))
        rows.append([Value(texts[0]), verdict, *values, Value(texts[7])])
    parts = [elements.paragraph(summary(verdicts)), elements.table(HEADS, rows, "comparison", keys=2)]
    parts.append(elements.paragraph(f"{clock}; {explain(threshold)}.", "note"))
    return document.wrap("tpbench comparison", "\n".join(parts))


def _sorted(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """What fails first, then by how much the ratio is off."""
    return sorted(
        verdicts, key=lambda each: (not each.fails(), each.ratio is None, -(each.ratio.value if each.ratio else 0))
    )
