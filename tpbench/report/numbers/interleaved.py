"""Ratio of two cells that were measured interleaved (ABBA order), from the medians of their rounds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tpbench.report.grids.records import Record
from tpbench.report.numbers.ratio import CONFIDENCE, FEWEST, Ratio, clean

METHOD = (
    "of cells that were measured interleaved, A B B A: Hodges-Lehmann estimate of the ratio and its "
    f"{CONFIDENCE:.0%} Wilcoxon signed-rank interval, by the logarithms of the rounds' ratios. It needs {2 * FEWEST} "
    "rounds. Drift that is steady over four rounds cancels"
)
ROUND_COLUMNS = {
    "time_ms": "round_ms", "samples_ms": "round_ms",
    "device_ms": "device_round_ms", "device_samples_ms": "device_round_ms",
}  # fmt: skip
"""Column with the medians of the rounds, by the metric or samples that are compared."""


def interleaved_ratio(above: Record, below: Record, compared: str) -> Ratio | None:
    """Return the ratio of two records by their rounds, or None.

    None means that the two were not interleaved with each other, that they have too few rounds, or that `compared` is
    no time.
    """
    column = ROUND_COLUMNS.get(compared)
    if column is None or not above["interleaved"] or above["interleaved"] != below["interleaved"]:
        return None
    return abba_ratio(above[column], below[column])


def abba_ratio(above: Sequence[float] | None, below: Sequence[float] | None) -> Ratio | None:
    """Return the ratio of two sequences of rounds that were measured in the order A B, B A, A B, ...

    Two rounds of each, A B B A, make one value, because the second of a single round has more of any drift. The
    estimate is the Hodges-Lehmann estimator, and the interval is that of the signed-rank test (Hollander and Wolfe,
    Nonparametric Statistical Methods, 3.2 and 3.3). Both assume that the values scatter symmetrically about their
    median.
    """
    top, bottom = clean(above), clean(below)
    whole = min(len(top), len(bottom)) // 2 * 2
    if whole < 2 * FEWEST or min(top.min(), bottom.min()) <= 0:
        return None
    values = np.log(top[:whole] / bottom[:whole]).reshape(-1, 2).mean(axis=1)
    averages = np.sort([(a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2)])
    outside = averages_below_interval(len(values))
    value, low, high = np.exp([np.median(averages), averages[outside], averages[-1 - outside]])
    return Ratio(float(value), float(low), float(high))


def averages_below_interval(count: int) -> int:
    """Return how many of the sorted Walsh averages of `count` values lie below their interval. As many lie above."""
    ways = [1]  # number of subsets of the ranks so far, by the sum of their ranks
    for rank in range(1, count + 1):
        longer = ways + [0] * rank
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    allowed = (1 - CONFIDENCE) / 2 * 2**count
    below = [total for total in itertools.accumulate(ways) if total <= allowed]
    return len(below) - 1
