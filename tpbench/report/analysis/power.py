"""What a comparison can see: the chance to find a change of a cell, and the common factor of all cells.

A change is found if its t test is significant and its ratio exceeds the threshold.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TypeAlias

from tpbench.report.analysis.comparison import Observation, Ratio, Row, RunSpread, Scatter, observations, tested
from tpbench.report.analysis.metrics import Metric

SURE = 0.9
"""A change counts as visible if it is found with this probability."""
FEWEST_CELLS = 5
"""Fewest cells that have a common factor."""
_MEDIAN_ERROR = 1.4826 * math.sqrt(math.pi / 2)
"""Standard error of the median of n normal values: their median absolute deviation, times this, over the root of n."""

Side: TypeAlias = Sequence[Observation]


@dataclass(frozen=True)
class Test:
    """The test of one cell among others."""

    alpha: float
    """The cell's part of the false-alarm rate."""
    threshold: float
    """The smallest change that counts, as a share."""

    def chance(self, ratio: Ratio, change: float) -> float:
        """Return the probability with which such rows show that a cell takes longer by a share."""
        from scipy import special

        return float(special.stdtr(ratio.freedom, (math.log1p(change) - self._limit(ratio)) / ratio.error))

    def smallest(self, ratio: Ratio) -> float:
        """Return the smallest change, as a share, that such rows show with the probability `SURE`."""
        from scipy import special

        return math.expm1(self._limit(ratio) + float(special.stdtrit(ratio.freedom, SURE)) * ratio.error)

    def _limit(self, ratio: Ratio) -> float:
        """Return the smallest logarithm of a ratio that is found."""
        from scipy import special

        reach = float(special.stdtrit(ratio.freedom, 1 - self.alpha / 2)) * ratio.error
        return max(reach, math.log1p(self.threshold))


def with_rows(ratio: Ratio, rows: int, assumed: RunSpread) -> Ratio:
    """Return the ratio as so many rows on each side would show it, measured in turns."""
    now = (ratio.freedom - assumed.freedom + 2) / 2
    return replace(ratio, error=ratio.error * math.sqrt(now / rows), freedom=assumed.freedom + 2 * rows - 2)


@dataclass(frozen=True)
class CommonFactor:
    """The factor by which all cells of some rows changed."""

    name: str
    """The rows: `all cells`, those on one host, or those of one run."""
    cells: int
    above: int
    """Cells with a ratio above 1."""
    ratio: Ratio


def common_factors(pairs: Sequence[tuple[Sequence[Row], Sequence[Row]]], shown: Metric) -> list[CommonFactor]:
    """Return the common factor of all cells, then those of each host and of each run of the second side, if several.

    `pairs` are the rows of each cell on both sides. Rows of one host are compared with those of the first side on that
    host, or without any with all of them.
    """
    seen = [(observations(before, shown), observations(after, shown)) for before, after in pairs]
    spread = Scatter.of(shown, [before for before, _ in pairs]).assumed
    factors = [_common_factor("all cells", seen, spread)]
    kinds: tuple[tuple[str, Callable[[Observation], str | None]], ...] = (
        ("host", lambda row: row.host),
        ("run", lambda row: row.run),
    )
    for kind, value_of in kinds:
        values = dict.fromkeys(value_of(row) for _, after in seen for row in after)
        for value in values if len(values) > 1 else ():
            parts = []
            for before, after in seen:
                alike = [row for row in before if value_of(row) == value]
                parts.append((alike or before, [row for row in after if value_of(row) == value]))
            factors.append(_common_factor(f"{kind} {value}", parts, spread))
    return [factor for factor in factors if factor]


def _common_factor(name: str, seen: Sequence[tuple[Side, Side]], spread: RunSpread) -> CommonFactor | None:
    """Return the median ratio of some cells, or None if these are too few.

    Its error has two parts: a run as a whole may be faster than the next, and cells scatter about the median.
    """
    seen = [(before, after) for before, after in seen if before and after]
    if len(seen) < FEWEST_CELLS:
        return None
    levels = [[fmean(row.log for row in side) for side in pair] for pair in seen]
    logs = [after - before for before, after in levels]
    common = median(logs)
    of_cells = _MEDIAN_ERROR * median(abs(log - common) for log in logs) / math.sqrt(len(logs))
    runs: list[list[Observation]] = []
    for at, offset in enumerate((0.0, common)):
        by_run: dict[str | None, list[tuple[Observation, float]]] = defaultdict(list)
        for pair, level in zip(seen, levels, strict=True):
            for row in pair[at]:
                by_run[row.run].append((row, row.log - level[at]))
        runs.append([])
        for rows in by_run.values():
            started, log = min(row.started for row, _ in rows), offset + fmean(rest for _, rest in rows)
            runs[at].append(replace(rows[0][0], log=log, started=started))
    # The cells' part doesn't fall with the number of runs.
    variance = spread.between_runs**2 + of_cells**2 / sum(1 / len(side) for side in runs)
    before, after = ([replace(run, variance=variance) for run in side] for side in runs)
    return CommonFactor(name, len(seen), sum(log > 0 for log in logs), tested(before, after, Scatter(spread)))
