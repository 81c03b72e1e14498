"""Verdict on each pair of cells: a ratio with its uncertainty, and a word."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from scipy import stats

from tpbench.report.compare.pairs import CellPair, differences, remarks
from tpbench.report.ratio import METHOD, Ratio, clean, ratio
from tpbench.report.records import CAVEATS, Record, caveat_mark, value_text

ALPHA = 0.05
CLOCKS = {"time_ms": "samples_ms", "device_ms": "device_samples_ms"}
FASTER, SLOWER, SAME, INCOMPARABLE = "faster", "slower", "same", "not comparable"
FAILS, WORKS, GONE, ADDED = "fails now", "works now", "only before", "only after"
_FAILED = {"oom", "wrong", "timeout", "error"}


@dataclass(frozen=True)
class CellChange:
    """Change of one cell between the two sets of rows."""

    name: str
    verdict: str
    """One of the words above."""
    before_ms: float | None = None
    after_ms: float | None = None
    """Median times."""
    ratio: Ratio | None = None
    """After over before."""
    p: float | None = None
    """p value, corrected for the number of cells that were tested."""
    note: str = ""

    def fails(self) -> bool:
        """Return true if this change makes the command fail."""
        return self.verdict in (SLOWER, FAILS)


def explain(threshold: float) -> str:
    """Return the method in two sentences, to be printed beside the numbers."""
    return (
        f"slower, faster: the medians differ by more than {threshold:.3g} of the old one and a two-sided Mann-Whitney "
        f"U test of the samples has p < {ALPHA} after Holm's correction for all cells tested. ratio: after over "
        f"before, with its {METHOD}"
    )


def compare_cells(
    pairs: Sequence[CellPair], clock: str, threshold: float, allowed: Collection[str] = ()
) -> list[CellChange]:
    """Return the change of every pair. `allowed` are columns in which the two rows may differ."""
    changes = [_uncorrected(pair, clock, allowed) for pair in pairs]
    tested = [index for index, change in enumerate(changes) if change.p is not None]
    corrected = holm([p for change in changes if (p := change.p) is not None])
    for index, p in zip(tested, corrected, strict=True):
        changes[index] = _conclude(changes[index], p, threshold, _least_p(pairs[index], clock) * len(tested))
    return changes


def _uncorrected(pair: CellPair, clock: str, allowed: Collection[str]) -> CellChange:
    """Return the change as far as one pair decides it. If there is something to test, `p` is not yet corrected."""
    before, after = pair.before, pair.after
    if before is None or after is None:
        only = before or after
        note = f"{value_text(only['hardware'])}: {value_text(only['status'])}" if only else ""
        return CellChange(pair.name, GONE if after is None else ADDED, note=note)
    statuses = before["status"], after["status"]
    old, new = (record[clock] if record["status"] == "ok" else None for record in (before, after))
    if reasons := differences(before, after, allowed):
        return CellChange(pair.name, INCOMPARABLE, old, new, note="; ".join(reasons))
    if statuses != ("ok", "ok"):
        return _of_statuses(pair.name, before, after, old, new)
    if mark := caveat_mark(before) or caveat_mark(after):
        return CellChange(pair.name, INCOMPARABLE, old, new, note=CAVEATS[mark])
    samples = before[CLOCKS[clock]], after[CLOCKS[clock]]
    found = ratio(samples[1], samples[0])
    if found is None:
        return CellChange(pair.name, INCOMPARABLE, old, new, note=f"no {CLOCKS[clock]}")
    p = float(stats.mannwhitneyu(clean(samples[0]), clean(samples[1]), alternative="two-sided").pvalue)
    return CellChange(pair.name, SAME, old, new, found, p, "; ".join(remarks(before, after, allowed)))


def _of_statuses(name: str, before: Record, after: Record, old: float | None, new: float | None) -> CellChange:
    statuses = f"{value_text(before['status'])}, then {value_text(after['status'])}"
    if before["status"] == "ok" and after["status"] in _FAILED:
        reason = f": {after['reason']}" if after["reason"] else ""
        return CellChange(name, FAILS, old, new, note=statuses + reason)
    if before["status"] in _FAILED and after["status"] == "ok":
        return CellChange(name, WORKS, old, new, note=statuses)
    return CellChange(name, SAME if before["status"] == after["status"] else INCOMPARABLE, old, new, note=statuses)


def _least_p(pair: CellPair, clock: str) -> float:
    """Return the smallest p value that this number of samples can show, however different they are."""
    sizes = [len(clean(record[CLOCKS[clock]])) for record in (pair.before, pair.after) if record]
    return min(1.0, 2 / math.comb(sum(sizes), sizes[0]))


def _conclude(change: CellChange, p: float, threshold: float, least_p: float) -> CellChange:
    assert change.ratio is not None
    difference = change.ratio.value - 1
    if least_p >= ALPHA and abs(difference) > threshold:
        note = "; ".join(filter(None, [change.note, "too few samples to tell"]))
        return replace(change, verdict=INCOMPARABLE, p=p, note=note)
    verdict = SAME
    if p < ALPHA and abs(difference) > threshold:
        verdict = SLOWER if difference > 0 else FASTER
    return replace(change, verdict=verdict, p=p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted by Holm's step-down correction, in the given order."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = highest
    return adjusted
