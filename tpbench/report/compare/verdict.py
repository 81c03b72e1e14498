"""Each pair of cells judged: a ratio, how sure it is, and a word."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from scipy import stats

from tpbench.report.compare.pairs import Pair, differences, remarks
from tpbench.report.pivot import mark
from tpbench.report.ratio import METHOD, Ratio, clean, ratio
from tpbench.report.records import Record, say
from tpbench.report.table import MARKS

ALPHA = 0.05
CLOCKS = {"time_ms": "samples_ms", "device_ms": "device_samples_ms"}
FASTER, SLOWER, SAME, INCOMPARABLE = "faster", "slower", "same", "not comparable"
FAILS, WORKS, GONE, ADDED = "fails now", "works now", "only before", "only after"
_FAILED = {"oom", "wrong", "timeout", "error"}


@dataclass(frozen=True)
class Verdict:
    """What became of one cell."""

    name: str
    verdict: str
    before: float | None = None
    after: float | None = None
    """Medians, in ms."""
    ratio: Ratio | None = None
    """After over before."""
    p: float | None = None
    """Corrected for the number of cells that were tested."""
    note: str = ""

    def fails(self) -> bool:
        """Whether this is why a guard should stop."""
        return self.verdict in (SLOWER, FAILS)


def explain(threshold: float) -> str:
    """The method in one sentence or two, for beside the numbers."""
    return (
        f"slower, faster: the medians differ by more than {threshold:.3g} of the old one and a two-sided Mann-Whitney "
        f"U test of the samples has p < {ALPHA} after Holm's correction for all cells tested. ratio: after over "
        f"before, with its {METHOD}"
    )


def judge(pairs: Sequence[Pair], clock: str, threshold: float, allowed: Collection[str] = ()) -> list[Verdict]:
    """A verdict for every pair."""
    verdicts = [_begin(pair, clock, allowed) for pair in pairs]
    tested = [index for index, verdict in enumerate(verdicts) if verdict.p is not None]
    corrected = holm([p for verdict in verdicts if (p := verdict.p) is not None])
    for index, p in zip(tested, corrected, strict=True):
        verdicts[index] = _conclude(verdicts[index], p, threshold, _least_p(pairs[index], clock) * len(tested))
    return verdicts


def _begin(pair: Pair, clock: str, allowed: Collection[str]) -> Verdict:
    """The verdict as far as the pair alone allows one; with `p` not yet corrected where there is something to test."""
    before, after = pair.before, pair.after
    if before is None or after is None:
        only = before or after
        note = f"{say(only['hardware'])}: {say(only['status'])}" if only else ""
        return Verdict(pair.name, GONE if after is None else ADDED, note=note)
    statuses = before["status"], after["status"]
    old, new = (record[clock] if record["status"] == "ok" else None for record in (before, after))
    if reasons := differences(before, after, allowed):
        return Verdict(pair.name, INCOMPARABLE, old, new, note="; ".join(reasons))
    if statuses != ("ok", "ok"):
        return _of_statuses(pair.name, before, after, old, new)
    if marked := mark(before) or mark(after):
        return Verdict(pair.name, INCOMPARABLE, old, new, note=MARKS[marked])
    samples = before[CLOCKS[clock]], after[CLOCKS[clock]]
    found = ratio(samples[1], samples[0])
    if found is None:
        return Verdict(pair.name, INCOMPARABLE, old, new, note=f"no {CLOCKS[clock]}")
    p = float(stats.mannwhitneyu(clean(samples[0]), clean(samples[1]), alternative="two-sided").pvalue)
    return Verdict(pair.name, SAME, old, new, found, p, "; ".join(remarks(before, after, allowed)))


def _of_statuses(name: str, before: Record, after: Record, old: float | None, new: float | None) -> Verdict:
    statuses = f"{say(before['status'])}, then {say(after['status'])}"
    if before["status"] == "ok" and after["status"] in _FAILED:
        reason = f": {after['reason']}" if after["reason"] else ""
        return Verdict(name, FAILS, old, new, note=statuses + reason)
    if before["status"] in _FAILED and after["status"] == "ok":
        return Verdict(name, WORKS, old, new, note=statuses)
    return Verdict(name, SAME if before["status"] == after["status"] else INCOMPARABLE, old, new, note=statuses)


def _least_p(pair: Pair, clock: str) -> float:
    """The smallest p that so few samples could have shown, however different."""
    sizes = [len(clean(record[CLOCKS[clock]])) for record in (pair.before, pair.after) if record]
    return min(1.0, 2 / math.comb(sum(sizes), sizes[0]))


def _conclude(verdict: Verdict, p: float, threshold: float, least_p: float) -> Verdict:
    assert verdict.ratio is not None
    change = verdict.ratio.value - 1
    if least_p >= ALPHA and abs(change) > threshold:
        note = "; ".join(filter(None, [verdict.note, "too few samples to tell"]))
        return replace(verdict, verdict=INCOMPARABLE, p=p, note=note)
    word = SAME
    if p < ALPHA and abs(change) > threshold:
        word = SLOWER if change > 0 else FASTER
    return replace(verdict, verdict=word, p=p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: adjusted p values in the given order."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = highest
    return adjusted
