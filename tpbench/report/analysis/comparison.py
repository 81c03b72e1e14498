"""The comparison of two groups of rows in one metric: a ratio with its interval. All reports use this one.

The samples of one process are not independent of each other: a run as a whole may be faster or slower than the next. So
a row counts as one observation. How far runs scatter follows from committed rows (`RunSpread`). Repeated rows of a cell
show how far they really do, and refine this assumption. For two cells that were measured interleaved, the
uncertainty follows from their rounds instead, with `SETUP_SCATTER` on top. All tests are t tests of logarithms. A ratio
of two rows is always that of their printed values.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np

from tpbench.measure.clocks import CHAINED, DEVICE, TIMED, WALL, Clock
from tpbench.measure.statistics import median_interval
from tpbench.report.analysis.row_values import Metric, Record, is_measurement

CONFIDENCE = 0.95
SETUP_SCATTER = 0.004
"""Standard deviation of the ratio of two interleaved cells that do the same work, apart from the scatter of rounds. It
stays as long as both are set up, for unknown reasons. Of 34 such pairs of block caps on an H100 and an H200, 10
intervals by device time exclude a tie without it, and one does with it."""
FEWEST = 6
"""Fewest samples of a row, or pairs of rounds, whose spread is known."""
FEWEST_ROWS = 3
"""Fewest rows on each side that can be compared if they have too few samples."""
METHOD = (
    f"{CONFIDENCE:.0%} interval of a ratio: a t test of logarithms. Each row is one observation, because a run as a "
    "whole may be faster than the next. How far runs scatter is known from repeated runs of committed rows"
)
TRIMMED = 0.2
"""Share of the rounds at each end that a trimmed mean leaves out."""
INTERLEAVED_METHOD = (
    "the ratio of the medians of cells that were measured interleaved, A B B A. The interval follows from the ratios "
    f"of single rounds, from {2 * FEWEST} rounds on: a t test of the logarithms' trimmed mean, with its distance to "
    f"the ratio of the medians, and {SETUP_SCATTER:.1%} for the set-up. Drift that is steady over four rounds cancels. "
    "Another process or host may differ by more"
)
_NORMAL_5_TO_95 = 2 * NormalDist().inv_cdf(0.95)
_NORMAL_INTERVAL = 2 * NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


class RunSpread(NamedTuple):
    """Assumed standard deviations between runs, of a value's logarithm. `docs reading` says how they were fitted."""

    least: float
    of_interval: float = 0.0
    """Multiple of the standard error of the median, as its interval says it: samples of a run are not independent."""
    of_spread: float = 0.0
    """Multiple of the spread of single samples, from percentile 5 to 95."""
    freedom: int = 4
    """Degrees of freedom. The more, the fewer cells scatter much more than others."""
    between_runs: float = 0.0
    """That of a sweep as a whole, against other sweeps on the same host."""
    between_hosts: float = 0.0
    """That of a host as a whole."""
    factor: float = 1.0
    """How many times as large as assumed the variance of repeated rows is, in all cells together."""


SPREADS = {
    DEVICE: RunSpread(0.002, of_interval=2.5, between_runs=0.002, between_hosts=0.008),
    CHAINED: RunSpread(0.01, of_interval=2.5, between_runs=0.03, between_hosts=0.03),
}
ON_WALL = RunSpread(0.015, of_spread=0.5, between_runs=0.03, between_hosts=0.03)
"""Wall times, and other clocks whose scatter isn't known."""
ON_CPU = RunSpread(0.01, of_spread=1.0, between_runs=0.03, between_hosts=0.03)
"""Runs on CPU cores that other programs use, too."""
COUNTED = RunSpread(0.003, freedom=10)
"""Numbers of bytes and operations are equal in nearly all runs: 66 cells differ by at most 0.3%."""


class Observation(NamedTuple):
    """What one row says about a metric."""

    log: float
    """Natural logarithm of the value."""
    variance: float
    """Variance between runs that is assumed for `log`."""
    known: bool = True
    """False if there are too few samples to see their spread."""
    started: float = 0.0
    """Start of the job, in seconds since 1970. 0: unknown."""
    host: str | None = None
    run: str | None = None
    """The sweep that measured it."""


class Ratio(NamedTuple):
    """Ratio of two groups of rows. The interval is missing if there are too few samples."""

    value: float
    low: float | None = None
    high: float | None = None
    interleaved: bool = False
    """True if the interval follows from the rounds of two cells."""
    p: float | None = None
    """p value of the hypothesis that both are equal. None: not tested."""
    error: float = 0.0
    """Standard error of the logarithm."""
    freedom: float = 1.0
    """Degrees of freedom of the t test."""

    @property
    def decided(self) -> bool:
        """True if the interval excludes a tie, or has no width because the ratio is exact."""
        if self.low is None or self.high is None:
            return False
        return self.low == self.high or not self.low <= 1 <= self.high


def compare(
    before: Sequence[Record], after: Sequence[Record], shown: Metric, spread: RunSpread | None = None
) -> Ratio | None:
    """Return the ratio of a metric of two groups of rows, after over before. None: a side has no positive value."""
    bottom, top = observations(before, shown), observations(after, shown)
    if not bottom or not top:
        return None
    log = _mean(top, "log") - _mean(bottom, "log")
    if len(before) == len(after) == 1 and (by_rounds := _ratio_of_rounds(before[0], after[0], shown.name, log)):
        return by_rounds
    if all(row.known for row in (*bottom, *top)) or min(len(bottom), len(top)) >= FEWEST_ROWS:
        return tested(bottom, top, spread or _spread_and_clock(before[0], shown)[0])
    return Ratio(_exp(log))


def repeated_spread(groups: Sequence[Sequence[Record]], shown: Metric) -> RunSpread:
    """Return the assumed spread, with the scatter of the repeated rows. A group is one cell on one side."""
    assumed, _ = _spread_and_clock(next(itertools.chain.from_iterable(groups), Record()), shown)
    repeated = [seen for group in groups if len(seen := observations(group, shown)) > 1]
    freedom = sum(map(len, repeated)) - len(repeated)  # 0: no cell has repeated rows
    total = sum(_squares(group) / _mean(group, "variance") for group in repeated)
    return assumed._replace(factor=(assumed.freedom + total) / (assumed.freedom + freedom))


def ratios_to_best(records: Sequence[Record | None], shown: Metric) -> list[Ratio | None]:
    """Return how many times worse each record is than the best with inputs of its kind. None: not ranked."""
    ratios: list[Ratio | None] = [None] * len(records)
    for fresh in (False, True) if shown.better else ():
        ranked = {
            at: record
            for at, record in enumerate(records)
            if record and bool(record["fresh"]) == fresh and value_of(record, shown) is not None
        }
        best: Any = min(ranked.values(), key=lambda record: -shown.better * record[shown.name], default=None)
        for at, record in ranked.items():
            below, above = (best, record) if shown.better < 0 else (record, best)
            exact = above[shown.name] / below[shown.name]
            is_exact = shown.is_counted or record is best
            ratios[at] = Ratio(exact, exact, exact) if is_exact else compare([below], [above], shown)
    return ratios


def value_of(row: Record, shown: Metric) -> float | None:
    """Return the metric of a measurement, or None if it has no positive value. Failures have none."""
    value = row.get(shown.name) if is_measurement(row) else None
    return float(value) if value is not None and 0 < value < math.inf else None


def observations(rows: Iterable[Record], shown: Metric) -> list[Observation]:
    """Return what rows say about a metric. Rows without a positive value say nothing."""
    observed = []
    for row in rows:
        if value := value_of(row, shown):
            started = row["started_at"].timestamp() if row.get("started_at") else 0.0
            spread = _assumed_variance(row, shown)
            observed.append(Observation(math.log(value), *spread, started, row.get("host"), row.get("sweep_id")))
    return observed


def _spread_and_clock(row: Record, shown: Metric) -> tuple[RunSpread, Clock]:
    """Return how runs are assumed to scatter in a metric, and its clock: of rates the device's, if it was measured."""
    by_device = shown.better > 0 and row.get(DEVICE.samples) is not None
    clock = shown.clock or (DEVICE if by_device else WALL)
    return COUNTED if shown.is_counted else ON_CPU if row.get("device") == "cpu" else SPREADS.get(clock, ON_WALL), clock


def _assumed_variance(row: Record, shown: Metric) -> tuple[float, bool]:
    """Return the variance between runs that is assumed for a metric, and false without enough samples to know it."""
    spread, clock = _spread_and_clock(row, shown)
    samples = _finite(row.get(clock.samples))
    if shown.is_counted or len(samples) < FEWEST or samples.min() <= 0:
        return spread.least**2, shown.is_counted
    logs = np.log(samples)
    low, high = np.percentile(logs, [5, 95])
    # Other statistics than medians, such as percentiles, scatter as much as single samples.
    is_median = shown.name == clock.column or shown.better > 0
    of_spread = (spread.of_spread if is_median else 1.0) * float(high - low) / _NORMAL_5_TO_95
    begin, end = median_interval(logs.tolist()) or (0.0, 0.0)
    return spread.least**2 + of_spread**2 + (spread.of_interval * (end - begin) / _NORMAL_INTERVAL) ** 2, True


def _exp(log: float) -> float:
    """Return the number of a logarithm: infinity if it is too large, as a ratio of extreme values may be."""
    return math.exp(log) if log < 709.78 else math.inf


def _ratio(log: float, error: float, freedom: float, *, interleaved: bool = False) -> Ratio:
    from scipy import special  # takes 0.3 s, which the table of one cell does not need

    reach = float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(special.stdtr(freedom, -abs(log) / error)) if error else float(not log)
    return Ratio(_exp(log), _exp(log - reach), _exp(log + reach), interleaved, p, error, freedom)


def _ratio_of_rounds(before: Record, after: Record, name: str, log: float) -> Ratio | None:
    """Return the ratio of two rows that were interleaved (`log`) with an interval from their rounds, or None.

    The rounds were measured in the order A B, B A, A B, ... Two rounds of each, A B B A, make one value, because the
    second of a single round has more of any drift. The error is that of the trimmed mean of these values (Yuen, The
    two-sample trimmed t for unequal population variances, 1974), and of its distance to the ratio of the medians.
    """
    column = next((clock.rounds for clock in TIMED if clock.column == name), None)
    together = [(row.get("interleaved"), row.get("sweep_id")) for row in (before, after)]
    if column is None or not together[0][0] or together[0] != together[1]:
        return None
    top, bottom = _finite(after[column]), _finite(before[column])
    whole = min(len(top), len(bottom)) // 2 * 2
    if whole < 2 * FEWEST or min(top.min(), bottom.min()) <= 0:
        return None
    values = np.sort(np.log(top[:whole] / bottom[:whole]).reshape(-1, 2).mean(axis=1))
    cut = int(TRIMMED * len(values))
    kept = values[cut : len(values) - cut]
    spread = np.clip(values, kept[0], kept[-1]).std(ddof=1)
    of_mean = spread * math.sqrt((len(values) - 1) / (len(kept) * (len(kept) - 1)))
    error = math.hypot(of_mean, log - float(kept.mean()), SETUP_SCATTER)
    return _ratio(log, error, len(kept) - 1, interleaved=True)


def tested(before: Sequence[Observation], after: Sequence[Observation], spread: RunSpread) -> Ratio:
    """Return the ratio of after over before with its interval and p value, by a t test.

    Its variance is the assumed one times the scatter of all cells, moderated by the cell's own repeated rows (Smyth,
    Linear models and empirical Bayes methods, 2004, with a fixed number of prior degrees of freedom). Rows of one side
    that follow each other count as one, because a drift of the machine affects all of them alike.
    """
    order = sorted((row.started, at) for at, side in enumerate((before, after)) for row in side)
    blocks = [side for side, _ in itertools.groupby(side for _, side in order)]  # A B A B: two blocks a side
    counts = blocks.count(0), blocks.count(1)
    assumed = (_mean(before, "variance") + _mean(after, "variance")) / 2
    squares = _squares(before) + _squares(after)
    variance = (spread.freedom * spread.factor * assumed + squares) / (spread.freedom + len(before) + len(after) - 2)
    if min(counts) < 2:
        variance = max(variance, assumed)
    variance *= sum(1 / count for count in counts)
    hosts = [{row.host for row in side} for side in (before, after)]
    if hosts[0] != hosts[1]:
        variance += spread.between_hosts**2 * sum(1 / len(side) for side in hosts)
    return _ratio(_mean(after, "log") - _mean(before, "log"), math.sqrt(variance), spread.freedom + sum(counts) - 2)


def _mean(side: Iterable[Observation], field: str) -> float:
    return fmean(getattr(row, field) for row in side)


def _finite(samples: Sequence[float] | None) -> Any:
    values = np.asarray([] if samples is None else samples, dtype=np.float64)
    return values[np.isfinite(values)]


def _squares(group: Sequence[Observation]) -> float:
    return len(group) * float(np.var([row.log for row in group]))
