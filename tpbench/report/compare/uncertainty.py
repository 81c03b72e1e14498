"""Uncertainty of a ratio of two cells, from how runs of one cell differ.

The samples of one process are not independent of each other: a run as a whole may be faster or slower than the next. So
a row counts as one observation. Its uncertainty is the spread of its samples, at least `LEAST_SPREAD`. Repeated rows of
a cell show how far runs really scatter, and refine this assumption. All numbers are of logarithms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from tpbench.report.analysis.metrics import Metric
from tpbench.report.analysis.ratios import CONFIDENCE, FEWEST, Ratio, clean
from tpbench.report.analysis.records import Record

LEAST_SPREAD = 0.01
"""Least standard deviation that is assumed between two runs of a cell, as a share of the value."""
PRIOR, PRIOR_OF_DEVICE = 4, 10
"""Degrees of freedom of the assumption. It weighs as much as the differences of five repeated rows.

Wall times have more outliers between runs than device times and counts have."""
_NORMAL_5_TO_95 = 2 * stats.norm.ppf(0.95)


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


def observe(record: Record, metric: Metric) -> Observation | None:
    """Return what a row says about a metric, or None if it has no positive value."""
    value = record.get(metric.name)
    if value is None or not math.isfinite(value) or value <= 0:
        return None
    started = record["started_at"].timestamp() if record.get("started_at") else 0.0
    log = math.log(value)
    if is_counted(metric):
        return Observation(log, LEAST_SPREAD**2, True, started)
    samples = clean(record.get("device_samples_ms" if metric.name.startswith("device") else "samples_ms"))
    if len(samples) < FEWEST or samples.min() <= 0:
        return Observation(log, LEAST_SPREAD**2, False, started)
    low, high = np.percentile(np.log(samples), [5, 95])
    return Observation(log, LEAST_SPREAD**2 + float((high - low) / _NORMAL_5_TO_95) ** 2, True, started)


def geometric_mean(observed: Sequence[Observation]) -> float:
    """Return the geometric mean of the values."""
    return math.exp(float(np.mean([observation.log for observation in observed])))


def is_counted(metric: Metric) -> bool:
    """Return true if the metric is a number of bytes or operations."""
    return metric.name == "flops" or metric.name.startswith("bytes_") or metric.name.endswith("_gib")


def scatter(metric: Metric, groups: Iterable[Sequence[Observation]]) -> Scatter:
    """Return the scatter of repeated rows. A group is one cell on one side."""
    prior = PRIOR_OF_DEVICE if is_counted(metric) or metric.name.startswith("device") else PRIOR
    freedom, total = 0, 0.0
    for group in groups:
        if len(group) > 1:
            freedom += len(group) - 1
            total += _squares(group) / _assumed(group)
    return Scatter(prior, (prior + total) / (prior + freedom), freedom)


def alternating_blocks(before: Sequence[Observation], after: Sequence[Observation]) -> tuple[int, int]:
    """Return how many blocks of successive rows each side has, by their start: A B A B is (2, 2), A A B B is (1, 1)."""
    order = sorted([(each.started, 0) for each in before] + [(each.started, 1) for each in after])
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
    assumed = float(np.mean([_assumed(side) for side in (before, after)]))
    own = len(before) + len(after) - 2
    squares = _squares(before) + _squares(after)
    variance = (scattered.prior * scattered.factor * assumed + squares) / (scattered.prior + own)
    if min(counts) < 2:
        variance = max(variance, assumed)
    error = math.sqrt(variance * sum(1 / count for count in counts))
    log_ratio = float(np.mean([each.log for each in after]) - np.mean([each.log for each in before]))
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    ratio = Ratio(math.exp(log_ratio), math.exp(log_ratio - reach), math.exp(log_ratio + reach))
    return Difference(ratio, 2 * float(stats.t.sf(abs(log_ratio) / error, freedom)), error, freedom)


def _assumed(side: Sequence[Observation]) -> float:
    """Return the mean variance that is assumed for the rows of one side."""
    return float(np.mean([each.variance for each in side]))


def least_visible(differences: Sequence[Difference], alpha: float) -> float | None:
    """Return the change that half of the cells would have to exceed to be seen, or None without cells."""
    if not differences:
        return None
    level = 1 - alpha / 2 / len(differences)
    return math.expm1(float(np.median([stats.t.ppf(level, each.freedom) * each.error for each in differences])))


def _squares(group: Sequence[Observation]) -> float:
    """Return the sum of squared deviations from the group's mean."""
    return float(np.var([each.log for each in group]) * len(group))
