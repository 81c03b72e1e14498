"""Statistics of samples, without torch and scipy, and the rule by which a cell is bound by the host."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpbench.measure.clocks import STATISTICS, Clock

Samples = list[np.ndarray[Any, Any]]
"""Per iteration the time on every rank in ms, (world_size,)."""

ONE_IN = 40
"""The true median lies below the 95% interval in at most one of 40 cases, and above it in at most one of 40."""

IDLE_SHARE = 0.2
"""An iteration is bound by the host if the device is idle for more than this share of it."""


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return a 95% confidence interval of the median, or None for fewer than 6 samples.

    It is [k-th smallest, k-th largest sample], for any distribution: the number of samples below the true median is
    binomial (Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2).
    """
    ordered = np.sort(samples)
    k = _interval_rank(len(ordered))
    return (float(ordered[k - 1]), float(ordered[-k])) if k else None


@functools.cache
def _interval_rank(count: int) -> int:
    """The largest k with P(Binomial(count, 1/2) < k) <= 1/40, in exact integers."""
    k, ways, ways_fewer = 0, 1, 1  # ways: Binomial coefficient (count, k)
    while ways_fewer * ONE_IN < 2**count:
        ways = ways * (count - k) // (k + 1)
        k, ways_fewer = k + 1, ways_fewer + ways
    return k


def summary(samples: Sequence[float], clock: Clock) -> dict[str, float | None]:
    """Return the statistics of a clock's samples: `clocks.STATISTICS`, by the clock's columns."""
    p5, median, p95 = map(float, np.percentile(samples, [5, 50, 95]))
    interval = median_interval(samples) or (None, None)
    values = (median, p5, p95, float(np.min(samples)), *interval)
    return dict(zip(map(clock.statistic, STATISTICS), values, strict=True))


def precise_enough(samples: Sequence[float], precision: float) -> bool:
    """Return whether both ends of the median's interval are within `precision` (a fraction) of the median."""
    interval, median = median_interval(samples), float(np.median(samples))
    return interval is not None and max(interval[1] - median, median - interval[0]) <= precision * median


def is_host_bound(idle_share: Any) -> Any:
    """Return whether the host bounds an iteration, for one idle share or for each of a pandas series."""
    return idle_share > IDLE_SHARE
