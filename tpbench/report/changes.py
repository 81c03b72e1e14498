"""Cells of two sets of rows in pairs, and a verdict on each pair: faster, slower, failing, or not comparable."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from tpbench.report.analysis import records, uncertainty
from tpbench.report.analysis.metrics import Metric, metric
from tpbench.report.analysis.records import Record, column_label, is_measurement, value_text
from tpbench.report.analysis.uncertainty import Observation, Ratio, Scatter
from tpbench.results.current_rows import hardware, replaced_rows
from tpbench.results.read import plain_rows
from tpbench.workloads import workloads

CellIdentity: TypeAlias = tuple[tuple[str, Any], ...]

ALPHA = 0.05
FEWEST_ROWS = 3
"""Fewest rows on each side that can be compared if they have too few samples."""
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
MUST_AGREE = (
    "gpu_name", "cpu_model", "driver_version", "cuda_version", "nccl_version", "torch_version", "triton_version",
    "python_version", "backend", "interpreted", "warmed_up", "memory_limit_gib",
)  # fmt: skip
"""Columns that must be equal for two rows to be compared, if both rows have them.

The model of the CPU counts on a CPU only. The memory limit counts on a GPU only, because on a CPU it is the memory that
was free. Versions of tpbench and its kernels may differ, because a comparison shows their effect."""
BESIDE = "beside"
"""Column with the jobs that ran on the host at the same time. Two rows are compared only if both ran alone."""
ACROSS = (*MUST_AGREE, BESIDE)
"""Columns whose difference a user may allow."""
_CODE = ("tpbench_version", "kernels_version", "variant_version", "git_commit", "git_dirty")
_NOTED = ("host", "gpu_count", "cpu_count", "package_versions", *_CODE)
"""Columns whose difference is noted but permitted. So are the recorded variables of the environment."""
_STACK = (*(name for name in ACROSS if name != "memory_limit_gib"), "package_versions", "host", *_CODE)
"""Columns that are equal in rows that repeat each other: the code, the packages and the machine."""
_OF_PLACE = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SPEEDS = ("copy_gb_per_s", "sm_clock_mhz", "memory_clock_mhz")
_SPEED_SHARE = 0.03
"""Columns of speeds, and the smallest difference that is noted."""
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
    """After over before."""
    p: float | None = None
    """p value, corrected for the number of cells that were tested. None: the cell was not tested."""
    rows: tuple[int, int] = (0, 0)
    """Rows on each side that the ratio is made of."""
    notes: tuple[str, ...] = ()

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
    scatter: Scatter = field(default_factory=Scatter)

    def method(self) -> list[str]:
        """Return what the verdicts mean, how runs scatter, and the false-alarm rate, as sentences."""
        above, below = verdict_words(self.metric)
        tested = sum(change.p is not None for change in self.changes)
        words = (
            f"{above}, {below}: {self.metric.name} differs by more than {100 * self.threshold:.3g}%, and a t test of "
            f"its logarithm has p < {ALPHA} after Holm's correction for the {tested} cells tested. {SAME}: it differs "
            f"by less. {UNCLEAR}: runs may scatter that much, or the interval reaches beyond {_SAME_REACH} times that "
            f"difference. ratio: after over before; low, high: its {uncertainty.CONFIDENCE:.0%} interval."
        )
        repeated = (
            f" Repeated rows of a cell ({self.scatter.freedom} more than one a side) scatter "
            f"{self.scatter.factor**0.5:.2g} times as much as samples let assume, which is taken into account."
        )
        return [words, f"{FALSE_ALARMS}.{repeated if self.scatter.freedom else ''}"]


def verdict_words(shown: Metric) -> tuple[str, str]:
    """Return the words for a ratio above 1 and below 1."""
    if shown.better == 0:
        return "higher", "lower"
    bad, good = (SLOWER, FASTER) if shown.name.endswith("_ms") else (WORSE, BETTER)
    return (bad, good) if shown.better < 0 else (good, bad)


def compare_cells(
    pairs: Sequence[CellPair], metric_name: str, threshold: float, allowed: Collection[str] = ()
) -> Comparison:
    """Return the change of every pair. `allowed` are columns in which the two rows may differ."""
    shown = metric(metric_name)
    sides = [[uncertainty.observations(rows, shown) for rows in (pair.before, pair.after)] for pair in pairs]
    comparison = Comparison(shown, threshold, scatter=uncertainty.scatter(shown, itertools.chain(*sides)))
    changes = [_change(pair, observed, comparison, allowed) for pair, observed in zip(pairs, sides, strict=True)]
    corrected = iter(holm([change.p for change in changes if change.p is not None]))
    concluded = (change if change.p is None else _conclude(change, next(corrected), comparison) for change in changes)
    return replace(comparison, changes=tuple(concluded))


def _change(
    pair: CellPair, sides: Sequence[Sequence[Observation]], comparison: Comparison, allowed: Collection[str]
) -> CellChange:
    """Return the change as far as one pair decides it. If there is something to test, `p` is not yet corrected."""
    if not pair.before or not pair.after:
        only = (pair.before or pair.after)[-1]
        note = f"{value_text(only['hardware'])}: {value_text(only['status'])}"
        return CellChange(pair.name, GONE if pair.before else ADDED, notes=(note,))
    (before, after), first, second, shown = sides, pair.before[-1], pair.after[-1], comparison.metric
    old, new = (record[shown.name] if record["status"] == "ok" else None for record in (first, second))
    change = CellChange(pair.name, INCOMPARABLE, old, new)
    if reasons := differences(first, second, allowed):
        return replace(change, notes=tuple(reasons))
    notes = tuple(remarks(pair.before, pair.after, allowed))
    if (first["status"], second["status"]) != ("ok", "ok"):
        return _of_statuses(change, first, second, notes)
    if mark := records.caveat_mark(first) or records.caveat_mark(second):
        return replace(change, notes=(records.MARKS[mark],))
    if not before or not after:
        if old is None or new is None or not (math.isfinite(old) and math.isfinite(new)) or min(old, new) < 0:
            lacking = [name for name, side in (("before", before), ("after", after)) if not side]
            return replace(change, notes=(f"no {shown.name} {' and '.join(lacking)}",))
        verdict = SAME if _is_small(shown, old, new) else verdict_words(shown)[new < old]
        return replace(change, verdict=verdict, rows=(1, 1), notes=notes)  # from or to 0: no ratio says that
    found = uncertainty.ratio(before, after, comparison.scatter)
    old, new = (
        uncertainty.geometric_mean(side) if len(side) > 1 else value for side, value in ((before, old), (after, new))
    )
    change = CellChange(pair.name, SAME, old, new, found, found.p, (len(before), len(after)), notes)
    if min(change.rows) >= FEWEST_ROWS or all(observation.known for observation in (*before, *after)):
        return change
    change = replace(change, p=None, ratio=Ratio(found.value))
    if abs(found.value - 1) <= comparison.threshold:
        return change
    too_few = "too few samples to tell: measure=default takes enough"
    return replace(change, verdict=INCOMPARABLE, notes=(*notes, too_few))


def _is_small(shown: Metric, old: float, new: float) -> bool:
    """Return true for a difference that never counts."""
    return old == new or (shown.name.endswith("_gib") and abs(new - old) < RESOLUTION_GIB)


def _of_statuses(change: CellChange, before: Record, after: Record, remarks: Sequence[str]) -> CellChange:
    one, other = before["status"], after["status"]
    statuses = f"{value_text(one)}, then {value_text(other)}"
    if one == "ok" and other in FAILED:
        reason = f": {after['reason']}" if after["reason"] else ""
        return replace(change, verdict=FAILS, notes=(statuses + reason, *remarks))
    if one in FAILED and other == "ok":
        return replace(change, verdict=WORKS, notes=(statuses, *remarks))
    return replace(change, verdict=SAME if one == other else INCOMPARABLE, notes=(statuses,))


def _conclude(change: CellChange, p: float, comparison: Comparison) -> CellChange:
    """Return the change with its corrected p value and the verdict that follows from it."""
    assert change.ratio and change.before is not None and change.after is not None
    if abs(change.ratio.value - 1) <= comparison.threshold:
        reach = 1 + _SAME_REACH * comparison.threshold
        is_vague = (change.ratio.high or 1) > reach or (change.ratio.low or 1) < 1 / reach
        return replace(change, verdict=UNCLEAR if is_vague else SAME, p=p)
    if _is_small(comparison.metric, change.before, change.after):
        return replace(change, p=p, notes=(*change.notes, f"less than {RESOLUTION_GIB * 1024:g} MiB never counts"))
    verdict = UNCLEAR if p >= ALPHA else verdict_words(comparison.metric)[change.ratio.value < 1]
    return replace(change, verdict=verdict, p=p)


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
    """Return the newest of some rows, after the rows that it repeats."""
    *older, newest = rows
    measured = filter(is_measurement, older if is_measurement(newest) else ())
    return (*(row for row in measured if stack(row) == stack(newest)), newest)


def stack(row: Record) -> tuple[Any, ...]:
    """Return the code, the packages and the machine of a row. Rows with the same ones repeat each other."""
    return tuple(row.get(name) for name in _STACK)


def rows_by_cell(frame: pd.DataFrame) -> dict[CellIdentity, dict[Any, list[Record]]]:
    """Return the rows of each cell by hardware, oldest first. Failures beside a measurement are left out."""
    frame = records.with_graph_memory(frame)
    frame = frame.drop(replaced_rows(frame))
    frame = frame.assign(hardware=hardware(frame)["hardware"], when=frame["finished_at"].fillna(frame["started_at"]))
    frame = frame.sort_values("when", kind="stable", na_position="first")
    cells: dict[CellIdentity, dict[Any, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in map(Record, plain_rows(frame)):
        cells[_identity(record)][record["hardware"]].append(record)
    return cells


def _identity(record: Record) -> CellIdentity:
    """Return the whole problem of a cell, options included. It does not depend on the defaults of the configuration."""
    workload = workloads().get(record["workload"])
    problem = records.problem_fields(workload) or dict.fromkeys(_NAMED_FIRST)
    defaults = dict.fromkeys(_ALWAYS) | problem | {"dp_size": 1, "nodes": 1, "graph": False, "fresh": False}
    values = {name: default if record.get(name) is None else record[name] for name, default in defaults.items()}
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
        words = [f"{column_label(name)}={value_text(values[name])}" for name in fields if name != "variant"]
        names[cell] = " ".join([value_text(values["variant"]), *words])
    return names


def differences(before: Record, after: Record, allowed: Iterable[str] = ()) -> list[str]:
    """Return why two rows must not be compared: differences in hardware, software and method."""
    return _differing([name for name in _that_count(before) if name not in allowed], before, after)


def _that_count(record: Record) -> list[str]:
    """Return the columns in which rows of this one's device must agree."""
    skipped = "memory_limit_gib" if record.get("device") == "cpu" else "cpu_model"
    return [name for name in ACROSS if name != skipped]


def remarks(before: Sequence[Record], after: Sequence[Record], allowed: Iterable[str] = ()) -> list[str]:
    """Return differences between the runs of a cell that permit a comparison but must be noted."""
    old, new = before[-1], after[-1]
    notes = _differing([*_NOTED, *(name for name in _that_count(old) if name in allowed)], old, new)
    left, right = (records.json_object(row.get("environment")) for row in (old, new))
    for name in sorted({*left, *right} - {*_OF_PLACE}) if left and right else ():
        one, other = (value_text(variables.get(name, "unset")) for variables in (left, right))
        notes += [f"{name} {one} and {other}"] if one != other else []
    marks = {"before": records.remark_marks(old), "after": records.remark_marks(new)}
    for mark in dict.fromkeys("".join(marks.values())):
        sides = [side for side, found in marks.items() if mark in found]
        notes.append(f"{records.mark_word(mark)} {' and '.join(sides)}")
    one, other = ("warm" if row.get("warm") or row.get("jobs_before") else "cold" for row in (old, new))
    if one != other:  # earlier jobs ran in the processes of one side, or in their torchrun
        notes.append(f"{one} processes before, {other} processes after")
    for name in _SPEEDS:
        if old.get(name) and new.get(name) and abs(new[name] / old[name] - 1) > _SPEED_SHARE:
            notes.append(f"{name} {new[name] / old[name] - 1:+.0%}")
    return notes


def _differing(names: Iterable[str], before: Record, after: Record) -> list[str]:
    """Return the columns in which two rows differ, with both values. A missing value doesn't count as a difference."""
    notes = []
    for name in names:
        old, new = before.get(name), after.get(name)
        if name == BESIDE:
            sides = [side for side, value in (("before", old), ("after", new)) if value]
            notes += [f"other jobs ran beside it {' and '.join(sides)}"] if sides else []
        elif old is not None and new is not None and old != new:
            left, right = (value_text(value)[: 12 if name in _CODE else None] for value in (old, new))
            notes.append(f"{name} {left} and {right}")
    return notes
