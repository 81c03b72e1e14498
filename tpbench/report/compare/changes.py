"""Verdict on each pair of cells: a ratio with its uncertainty, and a word."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from tpbench.report.analysis.metrics import Metric, metric
from tpbench.report.analysis.ratios import Ratio
from tpbench.report.analysis.records import CAVEATS, Record, caveat_mark, is_measurement, value_text
from tpbench.report.compare.conditions import differences, remarks
from tpbench.report.compare.pairs import CellPair
from tpbench.report.compare.uncertainty import (
    Difference,
    Observation,
    Scatter,
    difference,
    geometric_mean,
    least_visible,
    observe,
    scatter,
)

ALPHA = 0.05
FEWEST_ROWS = 3
"""Fewest rows on each side that can be compared if they have too few samples."""
RESOLUTION_GIB = 2**-10
"""A smaller difference of two memory sizes never counts, because allocators round."""
SAME, UNCLEAR, INCOMPARABLE = "same", "unclear", "not comparable"
FAILS, WORKS, GONE, ADDED = "fails now", "works now", "only before", "only after"
SLOWER, FASTER, WORSE, BETTER, HIGHER, LOWER = "slower", "faster", "worse", "better", "higher", "lower"
DECIDED = (SLOWER, FASTER, WORSE, BETTER, HIGHER, LOWER, SAME, UNCLEAR, FAILS, WORKS)
"""Verdicts on cells that were compared."""
FAILED = {"oom", "wrong", "timeout", "error"}


@dataclass(frozen=True)
class CellChange:
    """Change of one cell between the two sets of rows."""

    name: str
    verdict: str
    """One of the words above."""
    before: float | None = None
    after: float | None = None
    """The metric: the geometric mean of repeated rows."""
    difference: Difference | None = None
    """After over before, with its uncertainty."""
    p: float | None = None
    """p value, corrected for the number of cells that were tested."""
    rows: tuple[int, int] = (0, 0)
    """Rows on each side that the ratio is made of."""
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> Ratio | None:
        """After over before."""
        return self.difference.ratio if self.difference else None

    @property
    def note(self) -> str:
        """All notes in one line."""
        return "; ".join(self.notes)

    def fails(self) -> bool:
        """Return true if this change makes the command fail."""
        return self.verdict in (SLOWER, WORSE, FAILS)


@dataclass(frozen=True)
class Comparison:
    """Changes of all cells in one metric."""

    metric: Metric
    threshold: float
    changes: tuple[CellChange, ...] = ()
    scatter: Scatter = field(default_factory=Scatter)

    @property
    def decided(self) -> list[CellChange]:
        """The cells that were compared. Two failures or two skipped cells are no comparison."""
        return [each for each in self.changes if each.verdict in DECIDED and not _both_failed(each)]

    @property
    def tested(self) -> int:
        """Number of cells with a p value."""
        return sum(each.p is not None for each in self.changes)

    @property
    def least_visible(self) -> float | None:
        """The change that half of the tested cells would have to exceed to be called."""
        return least_visible(
            [each.difference for each in self.changes if each.difference and each.p is not None], ALPHA
        )


def verdict_words(shown: Metric) -> tuple[str, str, str, str]:
    """Return the words for a ratio above 1 and below 1, then those for bad and good, empty if neither is."""
    if shown.better == 0:
        return HIGHER, LOWER, "", ""
    bad, good = (SLOWER, FASTER) if shown.name.endswith("_ms") else (WORSE, BETTER)
    return (bad, good, bad, good) if shown.better < 0 else (good, bad, bad, good)


def compare_cells(
    pairs: Sequence[CellPair], metric_name: str, threshold: float, allowed: Collection[str] = ()
) -> Comparison:
    """Return the change of every pair. `allowed` are columns in which the two rows may differ."""
    shown = metric(metric_name)
    observed = [(_observations(pair.before_rows, shown), _observations(pair.after_rows, shown)) for pair in pairs]
    scattered = scatter(shown, (side for sides in observed for side in sides))
    changes = [
        _uncorrected(pair, shown, sides, scattered, threshold, allowed)
        for pair, sides in zip(pairs, observed, strict=True)
    ]
    corrected = iter(holm([p for change in changes if (p := change.p) is not None]))
    concluded = [
        change if change.p is None else _conclude(change, next(corrected), shown, threshold) for change in changes
    ]
    return Comparison(shown, threshold, tuple(concluded), scattered)


def _observations(rows: Sequence[Record], shown: Metric) -> list[Observation]:
    return [found for row in rows if is_measurement(row) and (found := observe(row, shown)) is not None]


def _uncorrected(
    pair: CellPair,
    shown: Metric,
    observed: tuple[list[Observation], list[Observation]],
    scattered: Scatter,
    threshold: float,
    allowed: Collection[str],
) -> CellChange:
    """Return the change as far as one pair decides it. If there is something to test, `p` is not yet corrected."""
    before, after = pair.before, pair.after
    if before is None or after is None:
        only = before or after
        assert only is not None
        note = f"{value_text(only['hardware'])}: {value_text(only['status'])}"
        return CellChange(pair.name, GONE if after is None else ADDED, notes=(note,))
    old, new = (record[shown.name] if record["status"] == "ok" else None for record in (before, after))
    change = CellChange(pair.name, INCOMPARABLE, old, new)
    if reasons := differences(before, after, allowed):
        return replace(change, notes=tuple(reasons))
    if (before["status"], after["status"]) != ("ok", "ok"):
        return _of_statuses(change, before, after)
    if mark := caveat_mark(before) or caveat_mark(after):
        return replace(change, notes=(CAVEATS[mark],))
    if lacking := [name for name, side in zip(("before", "after"), observed, strict=True) if not side]:
        return replace(change, notes=(f"no {shown.name} above 0 {' and '.join(lacking)}",))
    found = difference(*observed, scattered)
    rows = len(observed[0]), len(observed[1])
    notes = tuple(remarks(pair.before_rows, pair.after_rows, allowed))
    old, new = (
        geometric_mean(side) if len(side) > 1 else value for side, value in zip(observed, (old, new), strict=True)
    )
    change = CellChange(pair.name, SAME, old, new, found, rows=rows, notes=notes)
    known = min(rows) >= FEWEST_ROWS or all(each.known for side in observed for each in side)
    if known:
        return replace(change, p=found.p)
    change = replace(change, difference=replace(found, ratio=Ratio(found.ratio.value)))
    if abs(found.ratio.value - 1) <= threshold:
        return change
    return replace(change, verdict=INCOMPARABLE, notes=(*notes, "too few samples to tell"))


def _of_statuses(change: CellChange, before: Record, after: Record) -> CellChange:
    statuses = f"{value_text(before['status'])}, then {value_text(after['status'])}"
    if before["status"] == "ok" and after["status"] in FAILED:
        reason = f": {after['reason']}" if after["reason"] else ""
        return replace(change, verdict=FAILS, notes=(statuses + reason,))
    if before["status"] in FAILED and after["status"] == "ok":
        return replace(change, verdict=WORKS, notes=(statuses,))
    return replace(change, verdict=SAME if before["status"] == after["status"] else INCOMPARABLE, notes=(statuses,))


def _both_failed(change: CellChange) -> bool:
    return change.verdict == SAME and change.ratio is None


def _conclude(change: CellChange, p: float, shown: Metric, threshold: float) -> CellChange:
    ratio = change.ratio
    assert ratio is not None and change.before is not None and change.after is not None
    below_resolution = shown.name.endswith("_gib") and abs(change.after - change.before) < RESOLUTION_GIB
    if abs(ratio.value - 1) <= threshold or below_resolution:
        return replace(change, p=p)
    if p >= ALPHA:
        return replace(change, verdict=UNCLEAR, p=p)
    above, below, _, _ = verdict_words(shown)
    return replace(change, verdict=above if ratio.value > 1 else below, p=p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted by Holm's step-down correction, in the given order."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = highest
    return adjusted
