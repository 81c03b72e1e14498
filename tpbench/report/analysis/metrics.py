"""Metrics, the numbers of a row that a table can show, and ratios of two of them with an interval.

A ratio is that of two medians by all samples, or by the rounds of cells that were measured interleaved.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tpbench.results.schema import all_columns
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.workloads import workloads

_TIMES = [f"{clock}_{part}ms" for clock in ("time", "device") for part in ("", "p5_", "p95_", "min_")]
_LESS_IS_BETTER = (*_TIMES, "launch_ms", "peak_gib", "bytes_moved", "bytes_communicated")
_MORE_IS_BETTER = ("gb_per_s", "fraction_of_floor")
_NEITHER = ("floor_ms", "skew_ms", "copy_gb_per_s", "flops", "iterations", "wall_s", "memory_limit_gib")
_ORACLE = ("loss_value", "loss_error", "grad_error")
METRICS = (*_LESS_IS_BETTER, *_MORE_IS_BETTER, *_NEITHER, *_ORACLE)
"""Metrics of every workload, by name. A workload may add its own."""
TITLES = {
    "device_ms": "Device time",
    "time_ms": "Wall time",
    "fraction_of_floor": "Share of the floor",
    "peak_gib": "Extra peak memory",
}
"""Metrics that pictures and pages show first, with their titles."""

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
class Metric:
    """A number of a row, its meaning, and which of two values is better."""

    name: str
    doc: str
    unit: str
    better: int
    """-1: less is better. 1: more is better. 0: neither, and no ratio is shown."""

    @property
    def ratio(self) -> str:
        """The meaning of "2.00x" beside a value."""
        least = "fastest" if self.unit == "ms" else "smallest"
        return ("", "half the best of its line", f"twice the {least} of its line")[self.better]

    @property
    def shown_if_wrong(self) -> bool:
        """True for results of the oracle: they are shown of cells that failed its check, too."""
        return self.name in _ORACLE

    @property
    def is_speed(self) -> bool:
        """True for times and rates, which depend on the host and on clocks."""
        return self.better != 0 and self.unit not in ("GiB", "bytes")

    @property
    def is_time(self) -> bool:
        """True for statistics of `time_ms` and of `device_ms`."""
        return self.name in _TIMES

    def write(self, value: float) -> str:
        """Return the value with its unit, in about four digits."""
        return f"{number(value)} {self.unit}".rstrip()

    def ratios(self, values: Sequence[float]) -> list[float | None]:
        """Return for each value how many times worse it is than the best, or None if that has no meaning."""
        sound = [value for value in values if math.isfinite(value) and value > 0]
        if not self.better or not sound:
            return [None] * len(values)
        best = max(sound) if self.better > 0 else min(sound)
        ratios = (best / value if self.better > 0 else value / best for value in sound)
        return [next(ratios) if value in sound else None for value in values]


def metric(name: str) -> Metric:
    """Return the metric of that name, of any row or of one workload. Raises JobError that lists the valid names."""
    of_workloads = _of_workloads()
    if name not in METRICS and name not in of_workloads:
        raise JobError(unknown("metric", name, metrics_of_all()))
    column = all_columns()[name]
    better = of_workloads.get(name, -1 if name in _LESS_IS_BETTER else 1 if name in _MORE_IS_BETTER else 0)
    return Metric(name, column.doc, column.unit, better)


def metrics_of_all() -> list[str]:
    """Return the names of all metrics, those of single workloads last."""
    return list(dict.fromkeys((*METRICS, *_of_workloads())))


@functools.cache
def speeds() -> frozenset[str]:
    """Return the names of the metrics that are times or rates."""
    return frozenset(name for name in metrics_of_all() if metric(name).is_speed)


@functools.cache
def percentages() -> frozenset[str]:
    """Return the columns that are written as percentages."""
    return frozenset({"fraction_of_floor"}.union(*(workload.percentages for workload in workloads().values())))


def _of_workloads() -> dict[str, int]:
    """Return the metrics that workloads add, each with the sign of `Metric.better`."""
    return {name: better for workload in workloads().values() for name, better in workload.metrics.items()}


def number(value: float) -> str:
    """Return about four significant digits, without an exponent if that is readable."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 1000:
        return f"{value:.0f}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 10:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.1 or value == 0 else f"{value:.3g}"


def ratio_text(ratio: float) -> str:
    """Return a ratio such as "2.00x". Beyond a thousand its digits say nothing: one of the two values is near zero."""
    if ratio >= 1000:
        return ">999x"
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"


def counted(number_of: int, what: str) -> str:
    """Return a number with its noun, which gets an `s` unless the number is 1."""
    return f"{number_of} {what}{'' if number_of == 1 else 's'}"


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
    interleaved: bool = False
    """True for the ratio of two cells by their rounds."""


def ratio_of_records(above: Mapping[str, Any], below: Mapping[str, Any], clock: ClockColumns) -> Ratio:
    """Return the ratio of the times of two records.

    The ratio is by their rounds if they were interleaved with each other, else by their samples. A record without
    samples has a ratio of medians without an interval.
    """
    by_rounds = interleaved_ratio(above, below, clock.time_column)
    by_samples = by_rounds or ratio(above[clock.samples_column], below[clock.samples_column])
    return by_samples or Ratio(float(above[clock.time_column]) / float(below[clock.time_column]))


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


def interleaved_ratio(above: Mapping[str, Any], below: Mapping[str, Any], compared: str) -> Ratio | None:
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
    return Ratio(float(value), float(low), float(high), interleaved=True)


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
