"""Ratios of two measured cells with an interval: by their samples, or by the rounds of interleaved cells."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tpbench.report.analysis.grid import GridCell, RecordGrid
from tpbench.report.analysis.records import Record, is_measurement

CONFIDENCE = 0.95
DRAWS = 10_000
FEWEST = 6
"""Fewest samples of a side for which an interval is computed."""
METHOD = (
    f"{CONFIDENCE:.0%} bootstrap interval of the ratio of medians ({DRAWS} draws, percentiles, each side drawn anew); "
    f"from {FEWEST} samples a side on. It holds what varies within a run, not between runs"
)
INTERLEAVED_METHOD = (
    "of cells that were measured interleaved, A B B A: Hodges-Lehmann estimate of the ratio and its "
    f"{CONFIDENCE:.0%} Wilcoxon signed-rank interval, by the logarithms of the rounds' ratios. It needs {2 * FEWEST} "
    "rounds. Drift that is steady over four rounds cancels"
)
ROUND_COLUMNS = {"time_ms": "round_ms", "device_ms": "device_round_ms"}
"""Column with the medians of the rounds, by the metric that is compared."""
OUTLIER = "an outlier is more than 1.5 interquartile ranges outside the quartiles"

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int_]]


@dataclass(frozen=True)
class ClockColumns:
    """The columns of a clock that times iterations."""

    name: str
    time_column: str
    """Column of the median."""
    samples_column: str
    """Column of the times of all iterations."""


DEVICE = ClockColumns("device", "device_ms", "device_samples_ms")
WALL = ClockColumns("wall", "time_ms", "samples_ms")
CLOCKS = (DEVICE, WALL)
"""All clocks, the leading one first."""


@dataclass(frozen=True)
class Ratio:
    """Ratio of two medians. The interval is missing if there are too few samples."""

    value: float
    low: float | None = None
    high: float | None = None


def ratio_of_records(above: Record, below: Record, clock: ClockColumns) -> tuple[Ratio, bool]:
    """Return the ratio of the times of two records, and whether it is that of their rounds.

    The ratio is by their rounds if they were interleaved with each other, else by their samples. A record without
    samples has a ratio of medians without an interval.
    """
    by_rounds = interleaved_ratio(above, below, clock.time_column)
    by_samples = by_rounds or ratio(above[clock.samples_column], below[clock.samples_column])
    medians = (float(record[clock.time_column]) for record in (above, below))
    return by_samples or Ratio(next(medians) / next(medians)), by_rounds is not None


def ratio(above: Sequence[float] | None, below: Sequence[float] | None) -> Ratio | None:
    """Return median(above) / median(below) with its bootstrap interval, or None if a side has no positive median."""
    top, bottom = clean(above), clean(below)
    if not len(top) or not len(bottom) or np.median(bottom) <= 0 or np.median(top) <= 0:
        return None
    value = float(np.median(top) / np.median(bottom))
    if min(len(top), len(bottom)) < FEWEST:
        return Ratio(value)
    at_top, at_bottom = _resampled_medians(len(top), len(bottom))
    with np.errstate(divide="ignore"):
        draws = np.sort(top)[at_top] / np.sort(bottom)[at_bottom]
    low, high = np.percentile(draws, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Ratio(value, float(min(low, value)), float(max(high, value)))


def clean(samples: Sequence[float] | None) -> Array:
    """Return the finite samples as an array."""
    values = np.asarray([] if samples is None else samples, dtype=np.float64)
    finite: Array = values[np.isfinite(values)]
    return finite


@functools.lru_cache(maxsize=64)  # most cells have one of a few numbers of samples, and the draws are slow
def _resampled_medians(*counts: int) -> tuple[Indices, ...]:
    """Return, for sides of `counts` sorted samples, the index of the median in each bootstrap resample.

    A resample is samples[floor(n U)] for n uniform U, sorted with them. Its median is the sample at the median U, which
    is Beta((n + 1) / 2, (n + 1) / 2). This is exact for an odd n. For an even n, a plain bootstrap averages the two
    middle samples; here one sample between them replaces the average.
    """
    random = np.random.default_rng(0)  # the same rows make the same report
    middles = [(count, random.beta((count + 1) / 2, (count + 1) / 2, DRAWS)) for count in counts]
    return tuple(np.minimum((middle * count).astype(int), count - 1) for count, middle in middles)


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


def outliers(samples: Array) -> Array:
    """Return the samples that are outliers as defined by `OUTLIER`."""
    if len(samples) < 4:
        return samples[:0]
    low, high = np.percentile(samples, [25, 75])
    reach = 1.5 * (high - low)
    far: Array = samples[(samples < low - reach) | (samples > high + reach)]
    return far


@dataclass(frozen=True)
class ColumnSpeedup:
    """How many times faster the fastest column of a problem is than another."""

    problem: str
    fastest: GridCell
    other: GridCell
    ratio: Ratio
    interleaved: bool
    """True if the two were measured interleaved. Then the ratio is that of their rounds."""


def measured_cells(grid: RecordGrid) -> Iterator[tuple[str, GridCell]]:
    """Iterate over the cells of a grid that are correct and measurements, each with the name of its problem."""
    keys = grid.distinguishing_keys(grid.varying)
    return ((grid.problem_text(cell.key, keys), cell) for cell in grid.cells() if is_measurement(cell.record))


def speedups(grid: RecordGrid, clock: ClockColumns) -> list[ColumnSpeedup]:
    """Compare the fastest column of each problem with each other column, by the samples of `clock`."""
    compared = []
    by_problem: dict[str, list[tuple[float, GridCell]]] = {}
    for problem, cell in measured_cells(grid):
        samples = clean(cell.record[clock.samples_column])
        if len(samples) and (middle := float(np.median(samples))) > 0:
            by_problem.setdefault(problem, []).append((middle, cell))
    for problem, cells in by_problem.items():
        _, fastest = min(cells, key=lambda item: item[0])
        for _, cell in cells:
            if cell is not fastest:
                times, interleaved = ratio_of_records(cell.record, fastest.record, clock)
                compared.append(ColumnSpeedup(problem, fastest, cell, times, interleaved))
    return compared
