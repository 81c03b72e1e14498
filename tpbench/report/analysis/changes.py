"""A verdict on each pair of cells, and which changes such rows can show."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from tpbench.report.analysis import comparison
from tpbench.report.analysis.comparison import Observation, Ratio, RunSpread, compare, value_of
from tpbench.report.analysis.pairs import CellPair, differences, remarks
from tpbench.report.analysis.row_values import MARKS, Metric, Record, caveat_mark
from tpbench.suggestions import counted
from tpbench.tables import value_text

ALPHA = 0.05
COMMON_ALPHA = 0.01
"""Part of `ALPHA` for the common factor of all cells. The rest is for the single cells."""
SURE = 0.9
"""A change counts as visible if it is found with this probability."""
TO_SEE = 5 / 3
"""A comparison must be able to see a change of so many thresholds: 5% with the default threshold."""
FEWEST_CELLS = 5
"""Fewest cells that have a common ratio."""
RESOLUTION_GIB = 2**-10
"""A smaller difference of two memory sizes never counts, because allocators round."""
SAME, UNCLEAR, INCOMPARABLE = "same", "unclear", "not comparable"
FAILS, WORKS, GONE, ADDED = "fails now", "works now", "only before", "only after"
SLOWER, FASTER, WORSE, BETTER = "slower", "faster", "worse", "better"
FAILED = {"oom", "wrong", "timeout", "error"}
FALSE_ALARMS = (
    f"Of comparisons where nothing changed, at most {ALPHA:.0%} have a false alarm in any cell, if runs scatter no "
    "more than assumed"
)
_SAME_REACH = 10
"""An interval that reaches beyond this many thresholds says too little to call a cell the same."""
_MEDIAN_ERROR = 1.4826 * math.sqrt(math.pi / 2)
"""Standard error of the median of n normal values: their median absolute deviation, times this, over the root of n."""


@dataclass(eq=False)
class CellChange:
    """One cell in both sets of rows, or in one of them, and how it changed."""

    name: str
    before: Sequence[Record] = ()
    after: Sequence[Record] = ()
    """The newest row, and before it the rows that repeat it."""
    verdict: str = INCOMPARABLE
    """One of the words above, or of `verdict_words`."""
    ratio: Ratio | None = None
    """After over before. Its p value is corrected for the number of cells that were tested."""
    notes: Sequence[str] = ()

    @property
    def p(self) -> float | None:
        """The p value of the ratio. None: the cell was not tested."""
        return self.ratio.p if self.ratio else None

    @property
    def is_decided(self) -> bool:
        """True for a cell that was compared. Two failures or two skipped cells don't count as one."""
        fail_alike = self.verdict == SAME and self.after[-1]["status"] != "ok"
        return not fail_alike and self.verdict not in (INCOMPARABLE, GONE, ADDED)

    @property
    def fails(self) -> bool:
        """True if this change makes the command fail."""
        return self.verdict in (SLOWER, WORSE, FAILS)


@dataclass
class Comparison:
    """Changes of all cells in one metric."""

    metric: Metric
    threshold: float
    spread: RunSpread
    changes: Sequence[CellChange]
    common: Sequence[CellChange] = ()
    """The change that all cells have in common, then those of hosts and runs."""

    @property
    def tested(self) -> list[CellChange]:
        """The cells of which there was something to test."""
        return [change for change in self.changes if change.p is not None]

    @property
    def blind(self) -> list[CellChange]:
        """The cells in which `TO_SEE` thresholds would not surely have been found, if they are more than one of ten."""
        cells = [change for change in self.changes if change.ratio]
        blind = [one for one in cells if (self.smallest_seen(one) or math.inf) > TO_SEE * self.threshold]
        return blind if len(blind) > (1 - SURE) * len(cells) else []

    def smallest_seen(self, change: CellChange) -> float | None:
        """Return the smallest change, as a share, that would surely have been found. None: not tested."""
        if not change.ratio or change.p is None:
            return None
        beyond = float(special.stdtrit(change.ratio.freedom, SURE)) * change.ratio.error
        return math.expm1(self._limit(change, change.ratio) + beyond)

    def chance(self, change: CellChange, size: float, rows: int | None = None) -> float | None:
        """Return the probability with which such rows, or so many on each side in turns, show a change of this size."""
        if not (ratio := change.ratio) or not ratio.error:
            return None
        if rows is not None:
            error = ratio.error * math.sqrt((ratio.freedom - self.spread.freedom + 2) / 2 / rows)
            ratio = ratio._replace(error=error, freedom=self.spread.freedom + 2 * rows - 2)
        return float(special.stdtr(ratio.freedom, (math.log1p(size) - self._limit(change, ratio)) / ratio.error))

    def _limit(self, change: CellChange, ratio: Ratio) -> float:
        """Return the smallest logarithm of a ratio that is found. All cells together need half of the threshold."""
        alpha, threshold = (ALPHA - COMMON_ALPHA) / max(1, len(self.tested)), self.threshold
        if change in self.common:
            alpha, threshold = COMMON_ALPHA, self.threshold / 2
        reach = float(special.stdtrit(ratio.freedom, 1 - alpha / 2)) * ratio.error
        return max(reach, math.log1p(threshold))

    def method(self) -> list[str]:
        """Return what the verdicts mean and the false-alarm rate, as sentences."""
        above, below = verdict_words(self.metric)
        tested = counted(len(self.tested), "cell")
        return [
            f"{above}, {below}: {self.metric.name} differs by more than {100 * self.threshold:.3g}%, and a t test has "
            f"p < {ALPHA - COMMON_ALPHA} after correction for {tested}. {UNCLEAR}: runs may scatter that much. "
            "`python -m tpbench docs reading` explains the columns.",
            f"{FALSE_ALARMS}.",
        ]


def verdict_words(shown: Metric) -> tuple[str, str]:
    """Return the words for a ratio above 1 and below 1."""
    if shown.better == 0:
        return "higher", "lower"
    bad, good = (SLOWER, FASTER) if shown.name.endswith("_ms") else (WORSE, BETTER)
    return (bad, good) if shown.better < 0 else (good, bad)


def compare_cells(
    pairs: Sequence[CellPair], shown: Metric, threshold: float, allowed: Collection[str] = ()
) -> Comparison:
    """Return the change of every pair. `allowed` are columns in which the two rows may differ."""
    spread = comparison.repeated_spread([side for _, *sides in pairs for side in sides], shown)
    made = Comparison(shown, threshold, spread, [CellChange(*pair) for pair in pairs])
    for change in made.changes:
        change.verdict, change.ratio, change.notes = _judge(change, made, allowed)
    for change, p in zip(made.tested, holm([change.p for change in made.tested]), strict=True):
        _conclude(change, p, made)
    made.common = _common_changes(made)
    return made


def _judge(change: CellChange, made: Comparison, allowed: Collection[str]) -> tuple[str, Ratio | None, Sequence[str]]:
    """Return the verdict, the ratio and the notes, as far as one cell decides them. A p value is not yet corrected."""
    if not change.before or not change.after:
        only = (change.before or change.after)[-1]
        note = f"{value_text(only['hardware'])}: {value_text(only['status'])}"
        return GONE if change.before else ADDED, None, [note]
    first, second, shown = change.before[-1], change.after[-1], made.metric
    if conditions := differences(first, second, allowed):
        return INCOMPARABLE, None, conditions
    one, other = first["status"], second["status"]
    notes = remarks(first, second, allowed)
    if (one, other) != ("ok", "ok"):
        fails, works = one == "ok" and other in FAILED, one in FAILED and other == "ok"
        reason = f": {second['reason']}" if fails and second["reason"] else ""
        verdict = FAILS if fails else WORKS if works else SAME if one == other else INCOMPARABLE
        said = f"{value_text(one)}, then {value_text(other)}{reason}"
        return verdict, None, [said, *(notes if fails or works else [])]
    if mark := caveat_mark(first) or caveat_mark(second):
        return INCOMPARABLE, None, [MARKS[mark]]
    if ratio := compare(change.before, change.after, shown, made.spread):
        if ratio.p is None and abs(ratio.value - 1) > made.threshold:
            return INCOMPARABLE, ratio, ["too few samples to tell: measure=default takes enough", *notes]
        return SAME, ratio, notes
    old, new = (level(side, shown) for side in (change.before, change.after))
    if old is None or new is None or not (0 <= old < math.inf and 0 <= new < math.inf):
        return INCOMPARABLE, None, [f"{shown.name} is missing on a side"]
    return SAME if _is_small(old, new, shown) else verdict_words(shown)[new < old], None, notes  # from or to 0


def level(rows: Sequence[Record], shown: Metric) -> float | None:
    """Return the geometric mean of a metric of some rows. Of a single correct row, return its value."""
    values = [value for row in rows if (value := value_of(row, shown))]
    if len(values) > 1:
        return geometric_mean(values)
    return rows[-1][shown.name] if rows and rows[-1]["status"] == "ok" else None


def _is_small(old: float, new: float, shown: Metric) -> bool:
    """Return true for a difference that never counts."""
    return old == new or (shown.name.endswith("_gib") and abs(new - old) < RESOLUTION_GIB)


def _conclude(change: CellChange, p: float, made: Comparison) -> None:
    """Set the corrected p value of a tested change and the verdict that follows from it."""
    assert change.ratio
    ratio = change.ratio = change.ratio._replace(p=p)
    old, new = (level(side, made.metric) or 0.0 for side in (change.before, change.after))
    if abs(ratio.value - 1) <= made.threshold:
        reach = 1 + _SAME_REACH * made.threshold
        is_vague = (ratio.high or 1) > reach or (ratio.low or 1) < 1 / reach
        change.verdict = UNCLEAR if is_vague else SAME
    elif _is_small(old, new, made.metric):
        change.notes = [*change.notes, f"less than {RESOLUTION_GIB * 1024:g} MiB never counts"]
    else:
        change.verdict = UNCLEAR if p >= ALPHA - COMMON_ALPHA else verdict_words(made.metric)[ratio.value < 1]


def holm(p_values: Sequence[Any]) -> list[float]:
    """Return p values adjusted by Holm's step-down correction, in the given order."""
    ordered: Any = pd.Series(p_values, dtype=float).sort_values(kind="stable")
    steps = (ordered * np.arange(len(ordered), 0, -1)).cummax()
    return list(steps.clip(upper=1.0).sort_index())


def _common_changes(made: Comparison) -> list[CellChange]:
    """Return the change of all tested cells together, then of each host and run, against the same one if possible."""
    above = sum(change.ratio.value > 1 for change in made.tested if change.ratio)
    seen = pd.DataFrame(
        [
            (cell, side, *row)
            for cell, change in enumerate(made.tested)
            for side, rows in enumerate((change.before, change.after))
            for row in comparison.observations(rows, made.metric)
        ],
        columns=["cell", "side", *Observation._fields],
    ).fillna({"host": "", "run": ""})
    before, after = seen[seen["side"] == 0], seen[seen["side"] == 1]
    groups = {"all cells": seen}
    for kind in ("host", "run"):
        values = after[kind].drop_duplicates()
        for value in values if len(values) > 1 else ():
            alike, of_value = (side[side[kind].isin([value])] for side in (before, after))
            others = before[before["cell"].isin(of_value["cell"]) & ~before["cell"].isin(alike["cell"])]
            groups[f"{kind} {value}"] = pd.concat([alike[alike["cell"].isin(of_value["cell"])], others, of_value])
    found: list[CellChange] = []
    for name, group in groups.items():
        if group["cell"].nunique() >= FEWEST_CELLS:
            ratio = _common_ratio(group, made.spread._replace(factor=1.0))
            is_sure = ratio.p is not None and ratio.p < COMMON_ALPHA
            verdict = verdict_words(made.metric)[ratio.value < 1] if is_sure else UNCLEAR
            verdict = verdict if abs(ratio.value - 1) > made.threshold / 2 else SAME
            notes = [] if found else [f"above 1 in {above} of {len(made.tested)} cells"]
            found.append(CellChange(name, verdict=verdict, ratio=ratio, notes=notes))
    return found


def _common_ratio(seen: pd.DataFrame, spread: RunSpread) -> Ratio:
    """Return the median ratio of some cells. Runs as a whole scatter, and cells scatter about the median."""
    of_cell = seen.groupby(["cell", "side"])["log"]
    logs = of_cell.mean().unstack()[1] - of_cell.mean().unstack()[0]
    common = logs.median()
    of_cells = _MEDIAN_ERROR * (logs - common).abs().median() / math.sqrt(len(logs))
    level = seen["log"] - of_cell.transform("mean") + common * seen["side"]
    runs = seen.assign(log=level).sort_values("started", kind="stable").groupby(["side", "run"])
    sides = [*runs.agg(log=("log", "mean"), started=("started", "first"), host=("host", "first")).groupby("side")]
    # The cells' part doesn't fall with the number of runs.
    variance = spread.between_runs**2 + of_cells**2 / sum(1 / len(side) for _, side in sides)
    before, after = (
        [Observation(run.log, variance, started=run.started, host=run.host) for run in side.itertuples()]
        for _, side in sides
    )
    return comparison.tested(before, after, spread)
