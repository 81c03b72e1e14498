"""What a comparison can see: the chance to find a change of a cell, and the ratio that all cells have in common.

A change is found if its t test is significant and its ratio exceeds the threshold.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TypeAlias

from tpbench.report.analysis.comparison import Observation, Ratio, Row, RunSpread, Scatter, observations, tested
from tpbench.report.analysis.metrics import Metric

SURE = 0.9
"""A change counts as visible if it is found with this probability."""
FEWEST_CELLS = 5
"""Fewest cells that have a common ratio."""
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


def common_ratios(pairs: Sequence[tuple[Sequence[Row], Sequence[Row]]], shown: Metric) -> dict[str, Ratio]:
    """Return the common ratio of all cells, then those of each host and of each run of the second side, if several.

    `pairs` are the rows of each cell on both sides. Rows of one host are compared with those of the first side on that
    host, or without any with all of them. Fewer than `FEWEST_CELLS` cells have none.
    """
    seen = [(observations(before, shown), observations(after, shown)) for before, after in pairs]
    spread = Scatter.of(shown, [before for before, _ in pairs]).assumed
    groups = {"all cells": seen}
    for kind in ("host", "run"):
        values = dict.fromkeys(getattr(row, kind) for _, after in seen for row in after)
        for value in values if len(values) > 1 else ():
            parts = [[[row for row in side if getattr(row, kind) == value] for side in pair] for pair in seen]
            groups[f"{kind} {value}"] = [
                (alike or before, after) for (alike, after), (before, _) in zip(parts, seen, strict=True) if after
            ]
    return {name: _common_ratio(group, spread) for name, group in groups.items() if len(group) >= FEWEST_CELLS}


def _common_ratio(pairs: Sequence[tuple[Side, Side]], spread: RunSpread) -> Ratio:
    """Return the median ratio of some cells.

    Its error has two parts: a run as a whole may be faster than the next, and cells scatter about the median.
    """
    levels = [[fmean(row.log for row in side) for side in pair] for pair in pairs]
    logs = [after - before for before, after in levels]
    common = median(logs)
    of_cells = _MEDIAN_ERROR * median(abs(log - common) for log in logs) / math.sqrt(len(logs))
    sides: list[list[Observation]] = []
    for at, offset in enumerate((0.0, common)):
        runs: dict[str | None, list[Observation]] = defaultdict(list)
        for pair, level in zip(pairs, levels, strict=True):
            for row in pair[at]:
                runs[row.run].append(replace(row, log=row.log - level[at] + offset))
        firsts = [(min(rows, key=lambda row: row.started), rows) for rows in runs.values()]
        sides.append([replace(first, log=fmean(row.log for row in rows)) for first, rows in firsts])
    # The cells' part doesn't fall with the number of runs.
    variance = spread.between_runs**2 + of_cells**2 / sum(1 / len(side) for side in sides)
    before, after = ([replace(run, variance=variance) for run in side] for side in sides)
    return tested(before, after, Scatter(spread))
