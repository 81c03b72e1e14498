"""Explanation of two sets of rows of which no cell is in both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tpbench.report.analysis.records import Record, column_label, value_text
from tpbench.report.compare.pairs import CellIdentity, CellPair

_MOST_TRIED = 200
_SHOWN = 4


def explain_unpaired(pairs: Sequence[CellPair]) -> str:
    """Return what each side has, and in what the two most similar cells differ."""
    before = [(pair, pair.before) for pair in pairs if pair.before]
    after = [(pair, pair.after) for pair in pairs if pair.after]
    lines = [
        "nothing can be compared, because no cell is on both sides",
        f"  before: {_described([record for _, record in before])}",
        f"  after: {_described([record for _, record in after])}",
    ]
    nearest = min(
        ((_differing(old.identity, new.identity), old, new)
         for old, _ in before[:_MOST_TRIED] for new, _ in after[:_MOST_TRIED]),
        key=lambda found: len(found[0]), default=None,
    )  # fmt: skip
    if nearest is not None:
        differing, old, new = nearest
        shown = ", ".join(
            f"{column_label(name)} ({value_text(left)}, {value_text(right)})"
            for name, left, right in differing[: 2 * _SHOWN]
        )
        names = " and ".join(dict.fromkeys(value_text(dict(pair.identity)["variant"]) for pair in (old, new)))
        lines.append(f"  the two most similar cells ({names}) differ in {shown}")
    return "\n".join(lines)


def _described(records: Sequence[Record]) -> str:
    parts = [f"{len(records)} cells"]
    for name in ("workload", "variant", "hardware", "status"):
        counted = Counter(value_text(record.get(name)) for record in records).most_common()
        more = [f"{len(counted) - _SHOWN} more"] if len(counted) > _SHOWN else []
        parts.append(", ".join([*(f"{count} {text}" for text, count in counted[:_SHOWN]), *more]))
    return "; ".join(parts)


def _differing(old: CellIdentity, new: CellIdentity) -> list[tuple[str, Any, Any]]:
    left, right = dict(old), dict(new)
    return [
        (name, left.get(name), right.get(name))
        for name in dict.fromkeys([*left, *right])
        if left.get(name) != right.get(name)
    ]
