"""Cells of two sets of rows in pairs, and a verdict on each pair: faster, slower, failing, or not comparable."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from tpbench.report.analysis import comparison, records
from tpbench.report.analysis.comparison import Ratio, Scatter, compare, value_of
from tpbench.report.analysis.conditions import differences, remarks, stack
from tpbench.report.analysis.grid import form_of
from tpbench.report.analysis.metrics import Metric
from tpbench.report.analysis.power import SURE, Test, common_ratios, with_rows
from tpbench.report.analysis.records import Record, is_measurement, named, row_records, value_text
from tpbench.results.current_rows import replaced_rows
from tpbench.workloads import workloads
from tpbench.workloads.definition import workload_of

CellIdentity: TypeAlias = tuple[tuple[str, Any], ...]

ALPHA = 0.05
COMMON_ALPHA = 0.01
"""Part of `ALPHA` for the common factor of all cells. The rest is for the single cells."""
TO_SEE = 5 / 3
"""A comparison must be able to see a change of so many thresholds: 5% with the default threshold."""
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
_ALWAYS = ("workload", "variant", "device", "graph", "fresh", "nodes", "tp_size", "dp_size")
_SAME_REACH = 10
"""An interval that reaches beyond this many thresholds says too little to call a cell the same."""
_NAMED_FIRST = ("workload", "loss", "dtype", "tokens", "vocab", "tp_size")


@dataclass(frozen=True)
class CellPair:
    """One cell in both sets, or in one of them."""

    name: str
    before: tuple[Record, ...]
    after: tuple[Record, ...]
    """The newest row of the cell, and before it the rows that repeat it. Empty if the set has no such cell."""


@dataclass(frozen=True)
class CellChange:
    """Change of one cell between the two sets of rows."""

    name: str
    verdict: str
    """One of the words above, or of `verdict_words`."""
    before: float | None = None
    after: float | None = None
    """The metric: the geometric mean of repeated rows."""
    ratio: Ratio | None = None
    """After over before. Its p value is corrected for the number of cells that were tested."""
    rows: tuple[int, int] = (0, 0)
    """Rows on each side that the ratio is made of."""
    notes: tuple[str, ...] = ()

    @property
    def p(self) -> float | None:
        """The p value of the ratio. None: the cell was not tested."""
        return self.ratio.p if self.ratio else None

    @property
    def is_decided(self) -> bool:
        """True for a cell that was compared. Two failures or two skipped cells don't count as one."""
        if self.verdict == SAME:
            return self.ratio is not None or self.before is not None
        return self.verdict not in (INCOMPARABLE, GONE, ADDED)

    @property
    def fails(self) -> bool:
        """True if this change makes the command fail."""
        return self.verdict in (SLOWER, WORSE, FAILS)


@dataclass(frozen=True)
class Comparison:
    """Changes of all cells in one metric."""

    metric: Metric
    threshold: float
    changes: tuple[CellChange, ...] = ()
    scatter: Scatter | None = None
    common: tuple[CellChange, ...] = ()
    """The change that all cells have in common, then those of hosts and runs."""

    @property
    def tested(self) -> list[CellChange]:
        """The cells that were tested."""
        return [change for change in self.changes if change.p is not None]

    def test_of(self, change: CellChange) -> Test:
        """Return the test of a cell, or that of all cells together, for which half of the threshold counts."""
        if change in self.common:
            return Test(COMMON_ALPHA, self.threshold / 2)
        return Test((ALPHA - COMMON_ALPHA) / max(1, len(self.tested)), self.threshold)

    def smallest_seen(self, change: CellChange) -> float | None:
        """Return the smallest change, as a share, that would surely have been found. None: not tested."""
        return self.test_of(change).smallest(change.ratio) if change.ratio and change.p is not None else None

    @property
    def blind(self) -> list[CellChange]:
        """The cells in which `TO_SEE` thresholds would not surely have been found, if they are more than one of ten."""
        cells = [change for change in self.changes if change.ratio]
        blind = [one for one in cells if (self.smallest_seen(one) or math.inf) > TO_SEE * self.threshold]
        return blind if len(blind) > (1 - SURE) * len(cells) else []

    def chance(self, change: float, rows: int | None = None) -> float:
        """Return the mean probability with which a change of one cell is found, with so many rows on each side."""
        ratios = [cell.ratio for cell in self.tested if cell.ratio]
        if rows is not None and self.scatter:
            ratios = [with_rows(ratio, rows, self.scatter.assumed) for ratio in ratios]
        return fmean(self.test_of(self.tested[0]).chance(ratio, change) for ratio in ratios)

    @property
    def fails(self) -> bool:
        """True if a cell, or all cells together, got worse."""
        return any(change.fails for change in (*self.common[:1], *self.changes))

    def method(self) -> list[str]:
        """Return what the verdicts mean, how runs scatter, and the false-alarm rate, as sentences."""
        above, below = verdict_words(self.metric)
        words = (
            f"{above}, {below}: {self.metric.name} differs by more than {100 * self.threshold:.3g}%, and a t test of "
            f"its logarithm has p < {ALPHA - COMMON_ALPHA} after Holm's correction for the {len(self.tested)} cells "
            f"tested. {SAME}: it differs by less. {UNCLEAR}: runs may scatter that much, or the interval reaches "
            f"beyond {_SAME_REACH} times that difference. ratio: after over before; low, high: its "
            f"{comparison.CONFIDENCE:.0%} interval, for this cell alone."
        )
        together = (
            "sees: the smallest change that nine of ten such comparisons find. all cells: the median of their ratios; "
            f"more than {50 * self.threshold:.3g}% and p < {COMMON_ALPHA} count. Its interval says how much a whole "
            "run may differ from the next."
        )
        repeated = ""
        if self.scatter and self.scatter.freedom:
            repeated = (
                f" Repeated rows of a cell ({self.scatter.freedom} more than one a side) scatter "
                f"{self.scatter.factor**0.5:.2g} times as much as assumed, which is taken into account."
            )
        return [words, *([together] if self.common else []), f"{FALSE_ALARMS}.{repeated}"]


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
    scatter = Scatter.of(shown, [side for pair in pairs for side in (pair.before, pair.after)])
    made = Comparison(shown, threshold, scatter=scatter)
    changes = [_change(pair, made, allowed) for pair in pairs]
    corrected = iter(holm([change.p for change in changes if change.p is not None]))
    concluded = (change if change.p is None else _conclude(change, next(corrected), made) for change in changes)
    return replace(made, changes=tuple(concluded))


def with_common_changes(made: Comparison, pairs: Sequence[CellPair]) -> Comparison:
    """Return the comparison of these pairs with the changes that its tested cells have in common."""
    tested = [pair for pair, change in zip(pairs, made.changes, strict=True) if change.p is not None]
    above = sum(change.ratio.value > 1 for change in made.tested if change.ratio)
    common: list[CellChange] = []
    for name, ratio in common_ratios([(pair.before, pair.after) for pair in tested], made.metric).items():
        found = verdict_words(made.metric)[ratio.value < 1] if (ratio.p or 0.0) < COMMON_ALPHA else UNCLEAR
        verdict = SAME if abs(ratio.value - 1) <= made.threshold / 2 else found
        notes = () if common else (f"above 1 in {above} of {len(tested)} cells",)
        common.append(CellChange(name, verdict, ratio=ratio, notes=notes))
    return replace(made, common=tuple(common))


def _change(pair: CellPair, made: Comparison, allowed: Collection[str]) -> CellChange:
    """Return the change as far as one pair decides it. If there is something to test, `p` is not yet corrected."""
    if not pair.before or not pair.after:
        only = (pair.before or pair.after)[-1]
        note = f"{value_text(only['hardware'])}: {value_text(only['status'])}"
        return CellChange(pair.name, GONE if pair.before else ADDED, notes=(note,))
    first, second, shown = pair.before[-1], pair.after[-1], made.metric
    old, new = (level(side, shown) for side in (pair.before, pair.after))
    change = CellChange(pair.name, INCOMPARABLE, old, new)
    if reasons := differences(first, second, allowed):
        return replace(change, notes=tuple(reasons))
    change = replace(change, notes=tuple(remarks(pair.before, pair.after, allowed)))
    if (first["status"], second["status"]) != ("ok", "ok"):
        return _of_statuses(change, first, second)
    if mark := records.caveat_mark(first) or records.caveat_mark(second):
        return replace(change, notes=(records.MARKS[mark],))
    ratio = compare(pair.before, pair.after, shown, made.scatter)
    if ratio is None:
        values = {"before": math.nan if old is None else old, "after": math.nan if new is None else new}
        if lacking := [side for side, value in values.items() if not 0 <= value < math.inf]:
            return replace(change, notes=(f"no {shown.name} {' and '.join(lacking)}",))
        verdict = SAME if _is_small(change, shown) else verdict_words(shown)[values["after"] < values["before"]]
        return replace(change, verdict=verdict, rows=(1, 1))  # from or to 0: no ratio says that
    rows = tuple(sum(value_of(row, shown) is not None for row in side) for side in (pair.before, pair.after))
    change = replace(change, ratio=ratio, rows=(rows[0], rows[1]))
    if ratio.p is not None or abs(ratio.value - 1) <= made.threshold:
        return replace(change, verdict=SAME)
    return replace(change, notes=(*change.notes, "too few samples to tell: measure=default takes enough"))


def level(rows: Sequence[Record], shown: Metric) -> float | None:
    """Return the geometric mean of a metric of some rows. A single correct row has its value, whatever it is."""
    observed = comparison.observations(rows, shown)
    if len(observed) > 1:
        return comparison.geometric_mean(observed)
    return rows[-1][shown.name] if rows[-1]["status"] == "ok" else None


def _is_small(change: CellChange, shown: Metric) -> bool:
    """Return true for a difference that never counts."""
    old, new = change.before or 0.0, change.after or 0.0
    return old == new or (shown.name.endswith("_gib") and abs(new - old) < RESOLUTION_GIB)


def _of_statuses(change: CellChange, before: Record, after: Record) -> CellChange:
    one, other = before["status"], after["status"]
    statuses = f"{value_text(one)}, then {value_text(other)}"
    if one == "ok" and other in FAILED:
        reason = f": {after['reason']}" if after["reason"] else ""
        return replace(change, verdict=FAILS, notes=(statuses + reason, *change.notes))
    if one in FAILED and other == "ok":
        return replace(change, verdict=WORKS, notes=(statuses, *change.notes))
    return replace(change, verdict=SAME if one == other else INCOMPARABLE, notes=(statuses,))


def _conclude(change: CellChange, p: float, made: Comparison) -> CellChange:
    """Return the change with its corrected p value and the verdict that follows from it."""
    assert change.ratio
    ratio = replace(change.ratio, p=p)
    change = replace(change, ratio=ratio)
    if abs(ratio.value - 1) <= made.threshold:
        reach = 1 + _SAME_REACH * made.threshold
        is_vague = (ratio.high or 1) > reach or (ratio.low or 1) < 1 / reach
        return replace(change, verdict=UNCLEAR if is_vague else SAME)
    if _is_small(change, made.metric):
        return replace(change, notes=(*change.notes, f"less than {RESOLUTION_GIB * 1024:g} MiB never counts"))
    return replace(
        change, verdict=UNCLEAR if p >= ALPHA - COMMON_ALPHA else verdict_words(made.metric)[ratio.value < 1]
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted by Holm's step-down correction, in the given order."""
    ordered = pd.Series(p_values, dtype=float).sort_values(kind="stable")
    steps = (ordered * np.arange(len(ordered), 0, -1)).cummax()
    return list(steps.clip(upper=1.0).sort_index())


def pair_cells(before: pd.DataFrame, after: pd.DataFrame) -> list[CellPair]:
    """Pair the rows of each cell with those of the other set, on the same hardware if possible."""
    old, new = rows_by_cell(before), rows_by_cell(after)
    names = cell_names([*old, *new])
    pairs = []
    for cell in dict.fromkeys([*new, *old]):
        left, right = ({key: _repeated(rows) for key, rows in side.get(cell, {}).items()} for side in (old, new))
        sides = [(left.pop(machine), right.pop(machine)) for machine in [*right] if machine in left]
        sides += itertools.zip_longest(left.values(), right.values(), fillvalue=())
        pairs += [CellPair(names[cell], *side) for side in sides]
    return pairs


def _repeated(rows: Sequence[Record]) -> tuple[Record, ...]:
    """Return the newest of some rows, after the rows that it repeats, on any host of the same kind."""
    *older, newest = rows
    measured = filter(is_measurement, older if is_measurement(newest) else ())
    wanted = stack(newest, on_any_host=True)
    return (*(row for row in measured if stack(row, on_any_host=True) == wanted), newest)


def rows_by_cell(frame: pd.DataFrame) -> dict[CellIdentity, dict[Any, list[Record]]]:
    """Return the rows of each cell by hardware, oldest first. Failures beside a measurement are left out."""
    frame = frame.drop(replaced_rows(frame))
    frame = frame.assign(when=frame["finished_at"].fillna(frame["started_at"]))
    cells: dict[CellIdentity, dict[Any, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in row_records(frame.sort_values("when", kind="stable", na_position="first")):
        cells[_identity(record)][record["hardware"]].append(record)
    return cells


def _identity(record: Record) -> CellIdentity:
    """Return the whole problem of a cell, options included. It does not depend on the defaults of the configuration."""
    workload = workload_of(record)
    problem = records.problem_fields(workload) or dict.fromkeys(_NAMED_FIRST)
    defaults = dict.fromkeys(_ALWAYS) | problem | {"dp_size": 1, "nodes": 1, "graph": False, "fresh": False}
    values = {name: default if record.get(name) is None else record[name] for name, default in defaults.items()}
    values["form"] = form_of(workload) or None
    plain = (bool, int, float, type(None))
    return tuple(
        (name, value if name != "block_cap" and isinstance(value, plain) else str(value))
        for name, value in values.items()
    )


def cell_names(cells: Collection[CellIdentity]) -> dict[CellIdentity, str]:
    """Return the name of each cell: its variant, and the fields in which cells differ."""
    distinct = Counter(name for name, _ in dict.fromkeys(itertools.chain.from_iterable(cells)))
    shown = [name for name, count in distinct.items() if name in ("vocab", "tp_size") or count > 1]
    shown.sort(key=lambda name: _NAMED_FIRST.index(name) if name in _NAMED_FIRST else len(_NAMED_FIRST))
    defaults = {option for workload in workloads().values() for option in workload.option_defaults.items()}
    names = {}
    for cell in cells:
        values = dict(cell)
        fields = [name for name in shown if values.get(name) is not None and (name, values[name]) not in defaults]
        words = [named(name, values[name]) for name in fields if name != "variant"]
        names[cell] = " ".join([value_text(values["variant"]), *words])
    return names
