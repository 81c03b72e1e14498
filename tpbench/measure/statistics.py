"""From samples to the numbers of a row. Without scipy, whose import would cost every rank half a second."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

ONE_IN = 40
"""The median lies below a 95% interval in one of so many cases at most, and above it in as many."""


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """A 95% confidence interval of the median that assumes nothing of the distribution, or None for too few samples.

    The k-th smallest and k-th largest sample, with the largest k for which a Binomial(n, 1/2) count of samples below
    the median falls between them often enough (Conover, Practical Nonparametric Statistics, 3.2). Needs 6 samples.
    """
    ordered = np.sort(samples)
    k = _outside(len(ordered))
    if k < 1:
        return None
    return float(ordered[k - 1]), float(ordered[-k])


@functools.cache
def _outside(count: int) -> int:
    """The largest k such that fewer than k of `count` fair coins show heads in one of 40 cases at most."""
    k, ways, fewer = 0, 1, 1
    while fewer * ONE_IN < 2**count:
        ways = ways * (count - k) // (k + 1)
        k, fewer = k + 1, fewer + ways
    return k


def summary(samples: Sequence[float], prefix: str) -> dict[str, float | None]:
    """The columns that describe samples in ms: `PREFIX_p5_ms`, ... and the median as `PREFIX_ms`."""
    low, high = median_interval(samples) or (None, None)
    p5, median, p95 = np.percentile(samples, [5, 50, 95])
    return {
        f"{prefix}_ms": float(median),
        f"{prefix}_p5_ms": float(p5),
        f"{prefix}_p95_ms": float(p95),
        f"{prefix}_min_ms": float(np.min(samples)),
        f"{prefix}_ci_low_ms": low,
        f"{prefix}_ci_high_ms": high,
    }


def precise_enough(samples: Sequence[float], precision: float) -> bool:
    """Whether the interval of the median lies within that share of the median on either side."""
    interval = median_interval(samples)
    median = float(np.median(samples))
    return interval is not None and max(interval[1] - median, median - interval[0]) <= precision * median
