"""Uncertainty of a ratio of two cells: one model for tables, pages, comparisons and history.

The samples of one process are not independent of each other: a run as a whole may be faster or slower than the next. So
a row counts as one observation. Its uncertainty is the spread of its samples, at least `LEAST_SPREAD`. Repeated rows of
a cell show how far runs really scatter, and refine this assumption. Cells that were measured interleaved are compared
round by round instead, with `SETUP_SCATTER` on top. All tests are t tests of logarithms.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any, TypeAlias

import numpy as np

from tpbench.measure.clocks import TIMED
from tpbench.report.analysis.metrics import SAMPLES, Metric
from tpbench.report.analysis.records import is_measurement

CONFIDENCE = 0.95
LEAST_SPREAD = 0.01
"""Least standard deviation that is assumed between two runs of a cell, as a share of the value."""
SETUP_SCATTER = 0.004
"""Standard deviation of the ratio of two interleaved cells that do the same work, apart from the scatter of rounds. It
stays as long as both are set up, for unknown reasons. Of 34 such pairs of block caps on an H100 and an H200, 12
intervals by device time excluded a tie without it, and one does with it."""
PRIOR, PRIOR_OF_DEVICE = 4, 10
"""Degrees of freedom of the assumption. It weighs as much as the differences of five repeated rows.

Wall times have more outliers between runs than device times and counts have."""
FEWEST = 6
"""Fewest samples of a row, or pairs of rounds, whose spread is known."""
ROUND_COLUMNS = {clock.column: clock.rounds for clock in TIMED}
"""Column with the medians of the rounds, by the metric that is compared."""
METHOD = (
    f"{CONFIDENCE:.0%} interval of a ratio: a t test of logarithms. Each row is one observation, because a run as a "
    f"whole may be faster than the next; the spread of its samples, at least {LEAST_SPREAD:.0%}, stands for that"
)
INTERLEAVED_METHOD = (
    f"of cells that were measured interleaved, A B B A: the geometric mean of the rounds' ratios, not the ratio of the "
    f"medians. The interval is by a t test of their logarithms, from {2 * FEWEST} rounds on, with {SETUP_SCATTER:.1%} "
    "for the set-up. Drift that is steady over four rounds cancels"
)
_NORMAL_5_TO_95 = 2 * NormalDist().inv_cdf(0.95)

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


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
class Ratio:
    """Ratio of two cells. The interval is missing if there are too few samples."""

    value: float
    low: float | None = None
    high: float | None = None
    interleaved: bool = False
    """True for the ratio of two cells by their rounds."""
    p: float = 1.0

    @property
    def decided(self) -> bool:
        """True if the interval excludes a tie."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def _ratio(log: float, error: float, freedom: float, *, interleaved: bool = False) -> Ratio:
    """Return the ratio with this logarithm."""
    from scipy import special  # takes 0.3 s, which the table of one cell does not need

    reach = float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(special.stdtr(freedom, -abs(log) / error)) if error else float(not log)
    return Ratio(math.exp(log), math.exp(log - reach), math.exp(log + reach), interleaved, p)


def ratio_of_records(above: Mapping[str, Any], below: Mapping[str, Any], shown: Metric) -> Ratio | None:
    """Return the ratio of a metric of two records, or None if one of them has no positive value.

    The ratio is by their rounds if they were interleaved with each other.
    """
    by_rounds = interleaved_ratio(above, below, shown.name)
    if by_rounds:
        return by_rounds
    top, bottom = observations([above], shown), observations([below], shown)
    if not top or not bottom:
        return None
    found = ratio(bottom, top, scatter(shown, ()))
    return found if top[0].known and bottom[0].known else Ratio(found.value)


def interleaved_ratio(above: Mapping[str, Any], below: Mapping[str, Any], compared: str) -> Ratio | None:
    """Return the ratio of two records by their rounds, which were measured in the order A B, B A, A B, ...

    Two rounds of each, A B B A, make one value, because the second of a single round has more of any drift. Return None
    if the two were not interleaved with each other, have too few rounds, or `compared` isn't a time.
    """
    column = ROUND_COLUMNS.get(compared)
    if column is None or not above["interleaved"] or above["interleaved"] != below["interleaved"]:
        return None
    top, bottom = clean(above[column]), clean(below[column])
    whole = min(len(top), len(bottom)) // 2 * 2
    if whole < 2 * FEWEST or min(top.min(), bottom.min()) <= 0:
        return None
    values = np.log(top[:whole] / bottom[:whole]).reshape(-1, 2).mean(axis=1)
    error = math.hypot(values.std(ddof=1) / len(values) ** 0.5, SETUP_SCATTER)
    return _ratio(float(values.mean()), error, len(values) - 1, interleaved=True)


def clean(samples: Sequence[float] | None) -> Array:
    """Return the finite samples as an array."""
    values: Array = np.asarray([] if samples is None else samples, dtype=np.float64)
    return values[np.isfinite(values)]


def observations(rows: Iterable[Mapping[str, Any]], shown: Metric) -> list[Observation]:
    """Return what rows say about a metric. Failures and rows without a positive value say nothing."""
    found = []
    for row in rows:
        value = row.get(shown.name) if is_measurement(row) else None
        if value is None or not 0 < value < math.inf:
            continue
        variance, known = LEAST_SPREAD**2, True
        if not shown.is_counted:
            column = SAMPLES.get(f"{shown.name.partition('_')[0]}_ms", "samples_ms")
            if shown.better > 0 and row.get("device_samples_ms") is not None:
                column = "device_samples_ms"  # rates are by the device's clock if it was measured
            samples = clean(row.get(column))
            known = len(samples) >= FEWEST and samples.min() > 0
            if known:
                low, high = np.percentile(np.log(samples), [5, 95])
                variance += float((high - low) / _NORMAL_5_TO_95) ** 2
        started = row["started_at"].timestamp() if row.get("started_at") else 0.0
        found.append(Observation(math.log(value), variance, known, started))
    return found


def geometric_mean(observed: Sequence[Observation]) -> float:
    """Return the geometric mean of the values."""
    return math.exp(fmean([observation.log for observation in observed]))


def scatter(shown: Metric, groups: Iterable[Sequence[Observation]]) -> Scatter:
    """Return the scatter of repeated rows. A group is one cell on one side."""
    prior = PRIOR_OF_DEVICE if shown.is_counted or shown.name.startswith("device") else PRIOR
    repeated = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in repeated)
    total = sum(_squares(group) / _assumed(group) for group in repeated)
    return Scatter(prior, (prior + total) / (prior + freedom), freedom)


def ratio(before: Sequence[Observation], after: Sequence[Observation], scattered: Scatter) -> Ratio:
    """Return the ratio of after over before with its interval and p value, by a t test.

    Its variance is the assumed one times the scatter of all cells, moderated by the cell's own repeated rows (Smyth,
    Linear models and empirical Bayes methods, 2004, with a fixed number of prior degrees of freedom). Rows of one side
    that follow each other count as one, because a drift of the machine affects all of them alike.
    """
    order = sorted((observation.started, at) for at, side in enumerate((before, after)) for observation in side)
    blocks = [side for side, _ in itertools.groupby(side for _, side in order)]  # A B A B: two blocks a side
    counts = blocks.count(0), blocks.count(1)
    freedom = scattered.prior + sum(counts) - 2
    assumed = (_assumed(before) + _assumed(after)) / 2
    squares = _squares(before) + _squares(after)
    repeated = len(before) + len(after) - 2
    variance = (scattered.prior * scattered.factor * assumed + squares) / (scattered.prior + repeated)
    if min(counts) < 2:
        variance = max(variance, assumed)
    error = math.sqrt(variance * sum(1 / count for count in counts))
    return _ratio(math.log(geometric_mean(after) / geometric_mean(before)), error, freedom)


def _assumed(side: Sequence[Observation]) -> float:
    """Return the mean variance that is assumed for the rows of one side."""
    return fmean(observation.variance for observation in side)


def _squares(group: Sequence[Observation]) -> float:
    """Return the sum of squared deviations from the group's mean."""
    return len(group) * float(np.var([observation.log for observation in group]))
