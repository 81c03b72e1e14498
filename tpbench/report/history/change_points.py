"""Change points: rows of one cell in time order, divided where their level changes.

Each possible point of each series is tested by a t test of the logarithms on its two sides. The variance is that of the
rows, moderated by the spread of each row's samples and by the scatter of successive rows of all series. Bonferroni's
correction over all possible points of all series keeps the chance of any false alarm below `ALPHA`, if rows scatter
independently of each other. A series with a change is divided there, and both parts are tested again (binary
segmentation: Scott and Knott, A cluster analysis method for grouping means in the analysis of variance, 1974).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from tpbench.report.compare.uncertainty import PRIOR, Observation

Logs: TypeAlias = NDArray[np.float64]
ALPHA = 0.05
"""Largest chance of any false alarm in a whole history without changes."""


@dataclass(frozen=True)
class ChangePoint:
    """A change of the level of one series."""

    at: int
    """Index of the first row after the change."""
    ratio: float
    """Level after over level before. A level is the geometric mean of the rows up to the neighbouring changes."""
    p: float
    """p value, corrected for all possible points of all series."""


def run_scatter(series: Iterable[Sequence[Observation]]) -> float:
    """Return by which factor the variance between runs exceeds the assumed one, over all series. It is at least 1.

    Half the squared difference of two successive rows estimates the variance, and only a few differences contain a
    change. So the median of their ratios to the assumed variance is compared with that of a normal distribution.
    """
    ratios = [
        (after.log - before.log) ** 2 / (before.variance + after.variance)
        for rows in series
        for before, after in itertools.pairwise(rows)
    ]
    return max(1.0, float(np.median(ratios)) / float(stats.chi2.median(1))) if ratios else 1.0


def change_points(series: Sequence[Observation], threshold: float, tests: int, factor: float) -> list[ChangePoint]:
    """Return the changes of one series, in its order.

    Args:
        series: the metric of each row, in time order.
        threshold: smallest change that counts, as a share.
        tests: number of possible points of all series of the history.
        factor: scatter of runs of the whole history, as `run_scatter` returns it.
    """
    logs = np.array([each.log for each in series])
    assumed = factor * float(np.mean([each.variance for each in series]))
    cuts = sorted(_cuts(logs, 0, threshold, tests, assumed))
    edges = [0, *(at for at, _ in cuts), len(logs)]
    levels = [float(logs[start:end].mean()) for start, end in itertools.pairwise(edges)]
    return [
        ChangePoint(at, math.exp(after - before), p)
        for (at, p), (before, after) in zip(cuts, itertools.pairwise(levels), strict=True)
    ]


def _cuts(logs: Logs, start: int, threshold: float, tests: int, assumed: float) -> list[tuple[int, float]]:
    """Return index and p value of each change within these rows, of which the first has the index `start`."""
    if len(logs) < 2:
        return []
    at, change, p = _best_cut(logs, assumed)
    p *= tests
    if p >= ALPHA or abs(math.expm1(change)) <= threshold:
        return []
    before = _cuts(logs[:at], start, threshold, tests, assumed)
    return [*before, (start + at, p), *_cuts(logs[at:], start + at, threshold, tests, assumed)]


def _best_cut(logs: Logs, assumed: float) -> tuple[int, float, float]:
    """Return the most significant point, the change of the mean there, and the p value of its two-sided t test.

    The variance is the same on both sides. It is moderated by the assumed one (Smyth, Linear models and empirical Bayes
    methods, 2004, with a fixed number of prior degrees of freedom).
    """
    before = np.arange(1, len(logs))
    after = len(logs) - before
    sums = np.cumsum(logs)[:-1]
    means = sums / before, (logs.sum() - sums) / after
    changes = means[1] - means[0]
    squares = ((logs - logs.mean()) ** 2).sum() - changes**2 * before * after / len(logs)
    freedom = PRIOR + len(logs) - 2
    errors = np.sqrt((PRIOR * assumed + squares) / freedom * (1 / before + 1 / after))
    scores = np.abs(changes) / errors
    best = int(scores.argmax())
    return best + 1, float(changes[best]), float(2 * stats.t.sf(scores[best], freedom))
