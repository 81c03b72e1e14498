"""Verdict on each pair of cells: a ratio with its uncertainty, and a word.

The samples of one process are not independent of each other: a run as a whole may be faster or slower than the next. So
a row counts as one observation. Its uncertainty is the spread of its samples, at least `LEAST_SPREAD`. Repeated rows of
a cell show how far runs really scatter, and refine this assumption. The test is of logarithms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import stats

from tpbench.report.analysis.metrics import CONFIDENCE, FEWEST, Metric, Ratio, clean, metric
from tpbench.report.analysis.records import MARKS, Record, caveat_mark, is_measurement, value_text
from tpbench.report.compare.pairs import CellPair, differences, remarks

ALPHA = 0.05
LEAST_SPREAD = 0.01
"""Least standard deviation that is assumed between two runs of a cell, as a share of the value."""
PRIOR, PRIOR_OF_DEVICE = 4, 10
"""Degrees of freedom of the assumption. It weighs as much as the differences of five repeated rows.

Wall times have more outliers between runs than device times and counts have."""
FEWEST_ROWS = 3
"""Fewest rows on each side that can be compared if they have too few samples."""
RESOLUTION_GIB = 2**-10
"""A smaller difference of two memory sizes never counts, because allocators round."""
SAME, UNCLEAR, INCOMPARABLE = "same", "unclear", "not comparable"
FAILS, WORKS, GONE, ADDED = "fails now", "works now", "only before", "only after"
SLOWER, FASTER, WORSE, BETTER = "slower", "faster", "worse", "better"
FAILED = {"oom", "wrong", "timeout", "error"}
_NORMAL_5_TO_95 = 2 * stats.norm.ppf(0.95)
FALSE_ALARMS = (
    f"Of comparisons where nothing changed, at most {ALPHA:.0%} have a false alarm in any cell, if runs scatter no "
    "more than assumed"
)


@dataclass(frozen=True)
class Observation:
    """A metric of one row."""

    log: float
    """Natural logarithm of the value."""
    variance: float
    """Variance between runs that is assumed for `log`."""
    known: bool
    """False if there are too few samples to see their spread."""
    started: float = 0.0
    """Start of the job, in seconds since 1970. 0: unknown."""


@dataclass(frozen=True)
class Scatter:
    """Scatter of repeated rows of all cells, as a multiple of the variance that their samples let assume."""

    prior: int = PRIOR
    """Degrees of freedom of the assumption."""
    factor: float = 1.0
    freedom: int = 0
    """Degrees of freedom: repeated rows minus one for each side of a cell. 0: no cell has repeated rows."""


@dataclass(frozen=True)
class Difference:
    """Ratio of two cells with its uncertainty."""

    ratio: Ratio
    p: float
    error: float
    """Standard error of the ratio's logarithm."""
    freedom: float


@dataclass(frozen=True)
class CellChange:
    """Change of one cell between the two sets of rows."""

    name: str
    verdict: str
    """One of the words above, or of `verdict_words`."""
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

    @property
    def is_decided(self) -> bool:
        """True for a cell that was compared. Two failures or two skipped cells are no comparison."""
        if self.verdict == SAME:
            return self.ratio is not None
        return self.verdict not in (INCOMPARABLE, GONE, ADDED)

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
    def least_visible(self) -> float | None:
        """The change that half of the tested cells would have to exceed to be called."""
        tested = [change.difference for change in self.changes if change.difference and change.p is not None]
        if not tested:
            return None
        level = 1 - ALPHA / 2 / len(tested)
        return math.expm1(float(np.median([stats.t.ppf(level, each.freedom) * each.error for each in tested])))

    def method(self) -> list[str]:
        """Return what the verdicts mean, how runs scatter, and the false-alarm rate, as sentences."""
        above, below = verdict_words(self.metric)
        tested = sum(change.p is not None for change in self.changes)
        sentences = [
            f"{above}, {below}: {self.metric.name} differs by more than {100 * self.threshold:.3g}%, and a t test of "
            f"its logarithm has p < {ALPHA} after Holm's correction for the {tested} cells tested. {SAME}: it differs "
            f"by less. {UNCLEAR}: runs may scatter that much. ratio: after over before; low, high: its "
            f"{CONFIDENCE:.0%} interval.",
            f"{FALSE_ALARMS}.",
        ]
        if self.scatter.freedom:
            sentences[-1] += (
                f" Repeated rows of a cell ({self.scatter.freedom} more than one a side) scatter "
                f"{self.scatter.factor**0.5:.2g} times as much as samples let assume, which is taken into account."
            )
        visible = self.least_visible
        if visible is not None and visible > self.threshold:
            sentences.append(
                f"These rows can show changes of about {visible:.0%} or more (median cell). To see smaller ones, "
                "repeat both sweeps in turns and name all: compare A1,A2,A3 B1,B2,B3."
            )
        return sentences


def verdict_words(shown: Metric) -> tuple[str, str]:
    """Return the words for a ratio above 1 and below 1."""
    if shown.better == 0:
        return "higher", "lower"
    bad, good = (SLOWER, FASTER) if shown.name.endswith("_ms") else (WORSE, BETTER)
    return (bad, good) if shown.better < 0 else (good, bad)


def compare_cells(
    pairs: Sequence[CellPair], metric_name: str, threshold: float, allowed: Collection[str] = ()
) -> Comparison:
    """Return the change of every pair. `allowed` are columns in which the two rows may differ."""
    shown = metric(metric_name)
    observed = [(observations(pair.before_rows, shown), observations(pair.after_rows, shown)) for pair in pairs]
    scattered = scatter(shown, itertools.chain(*observed))
    changes = [
        _uncorrected(pair, shown, sides, scattered, threshold, allowed)
        for pair, sides in zip(pairs, observed, strict=True)
    ]
    corrected = iter(holm([p for change in changes if (p := change.p) is not None]))
    concluded = [
        change if change.p is None else _conclude(change, next(corrected), shown, threshold) for change in changes
    ]
    return Comparison(shown, threshold, tuple(concluded), scattered)


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
    if not before or not after:
        only = before or after or {}
        note = f"{value_text(only['hardware'])}: {value_text(only['status'])}"
        return CellChange(pair.name, GONE if before else ADDED, notes=(note,))
    old, new = (record[shown.name] if record["status"] == "ok" else None for record in (before, after))
    change = CellChange(pair.name, INCOMPARABLE, old, new)
    if reasons := differences(before, after, allowed):
        return replace(change, notes=tuple(reasons))
    if (before["status"], after["status"]) != ("ok", "ok"):
        return _of_statuses(change, before, after)
    if mark := caveat_mark(before) or caveat_mark(after):
        return replace(change, notes=(MARKS[mark],))
    if lacking := [name for name, side in zip(("before", "after"), observed, strict=True) if not side]:
        return replace(change, notes=(f"no {shown.name} above 0 {' and '.join(lacking)}",))
    tested = difference(*observed, scattered)
    rows = len(observed[0]), len(observed[1])
    old, new = (
        geometric_mean(side) if len(side) > 1 else value for side, value in zip(observed, (old, new), strict=True)
    )
    notes = tuple(remarks(pair.before_rows, pair.after_rows, allowed))
    change = CellChange(pair.name, SAME, old, new, tested, tested.p, rows, notes)
    if min(rows) >= FEWEST_ROWS or all(observation.known for side in observed for observation in side):
        return change
    change = replace(change, p=None, difference=replace(tested, ratio=Ratio(tested.ratio.value)))
    if abs(tested.ratio.value - 1) <= threshold:
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


def _conclude(change: CellChange, p: float, shown: Metric, threshold: float) -> CellChange:
    """Return the change with its corrected p value and the verdict that follows from it."""
    assert change.ratio and change.before is not None and change.after is not None
    ratio = change.ratio.value
    below_resolution = shown.name.endswith("_gib") and abs(change.after - change.before) < RESOLUTION_GIB
    if abs(ratio - 1) <= threshold or below_resolution:
        return replace(change, p=p)
    above, below = verdict_words(shown)
    return replace(change, verdict=UNCLEAR if p >= ALPHA else above if ratio > 1 else below, p=p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted by Holm's step-down correction, in the given order."""
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=float)[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return [float(p) for p in adjusted]


def observations(rows: Iterable[Record], shown: Metric) -> list[Observation]:
    """Return what rows say about a metric. Failures and rows without a positive value say nothing."""
    return [
        _observation(row, float(value), shown)
        for row in rows
        if is_measurement(row) and (value := row.get(shown.name)) is not None and 0 < value < math.inf
    ]


def _observation(row: Record, value: float, shown: Metric) -> Observation:
    started = row["started_at"].timestamp() if row.get("started_at") else 0.0
    variance, known = LEAST_SPREAD**2, True
    if not is_counted(shown):
        samples = clean(row.get("device_samples_ms" if shown.name.startswith("device") else "samples_ms"))
        known = len(samples) >= FEWEST and samples.min() > 0
        if known:
            low, high = np.percentile(np.log(samples), [5, 95])
            variance += float((high - low) / _NORMAL_5_TO_95) ** 2
    return Observation(math.log(value), variance, known, started)


def geometric_mean(observed: Sequence[Observation]) -> float:
    """Return the geometric mean of the values."""
    return math.exp(_mean_log(observed))


def _mean_log(observed: Sequence[Observation]) -> float:
    return float(np.mean([observation.log for observation in observed]))


def is_counted(shown: Metric) -> bool:
    """Return true if the metric is a number of bytes or operations."""
    return shown.name == "flops" or shown.name.startswith("bytes_") or shown.name.endswith("_gib")


def scatter(shown: Metric, groups: Iterable[Sequence[Observation]]) -> Scatter:
    """Return the scatter of repeated rows. A group is one cell on one side."""
    prior = PRIOR_OF_DEVICE if is_counted(shown) or shown.name.startswith("device") else PRIOR
    repeated = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in repeated)
    total = sum(_squares(group) / _assumed(group) for group in repeated)
    return Scatter(prior, (prior + total) / (prior + freedom), freedom)


def alternating_blocks(before: Sequence[Observation], after: Sequence[Observation]) -> tuple[int, int]:
    """Return how many blocks of successive rows each side has, by their start: A B A B is (2, 2), A A B B is (1, 1)."""
    order = sorted((observation.started, at) for at, side in enumerate((before, after)) for observation in side)
    sides = [side for side, _ in itertools.groupby(side for _, side in order)]
    return sides.count(0), sides.count(1)


def difference(before: Sequence[Observation], after: Sequence[Observation], scattered: Scatter) -> Difference:
    """Return the ratio of after over before with its interval and p value, by a t test.

    Its variance is the assumed one times the scatter of all cells, moderated by the cell's own repeated rows (Smyth,
    Linear models and empirical Bayes methods, 2004, with a fixed number of prior degrees of freedom). Rows of one side
    that follow each other count as one, because a drift of the machine affects all of them alike.
    """
    counts = alternating_blocks(before, after)
    freedom = scattered.prior + sum(counts) - 2
    assumed = (_assumed(before) + _assumed(after)) / 2
    squares = _squares(before) + _squares(after)
    repeated = len(before) + len(after) - 2
    variance = (scattered.prior * scattered.factor * assumed + squares) / (scattered.prior + repeated)
    if min(counts) < 2:
        variance = max(variance, assumed)
    error = math.sqrt(variance * sum(1 / count for count in counts))
    log_ratio = _mean_log(after) - _mean_log(before)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    ratio = Ratio(math.exp(log_ratio), math.exp(log_ratio - reach), math.exp(log_ratio + reach))
    return Difference(ratio, 2 * float(stats.t.sf(abs(log_ratio) / error, freedom)), error, freedom)


def _assumed(side: Sequence[Observation]) -> float:
    """Return the mean variance that is assumed for the rows of one side."""
    return float(np.mean([observation.variance for observation in side]))


def _squares(group: Sequence[Observation]) -> float:
    """Return the sum of squared deviations from the group's mean."""
    return float(np.var([observation.log for observation in group]) * len(group))
