"""A variant's model: what it counts, fitted to measured cells, with errors on cells that were left out.

The counts come from the cost model of the entropy loss. A wall time is the device time and what the host adds. The
host's part depends on launches and ranks, not on bytes: a fit of wall times with terms of bytes would mistake
differences between hosts for bytes. Between measured sizes a time follows the measured cells nearby: what the fit
leaves at each of them is interpolated (kriging).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy import optimize

from tpbench.predict.cells import MeasuredCell, MeasuredCells
from tpbench.predict.target import RESERVE_GIB, SAME_SHARE
from tpbench.report.analysis.metrics import amount
from tpbench.workloads.entropy_loss.cost_model import LossSize, Terms, counts

MIN_SIZES = 4
"""A variant with fewer measured sizes is not predicted."""
ERROR_BAR_SHARE = 0.9
"""Share of the left-out cells that lie within an error bar."""
KINDS = ("size", "ranks", "far size", "more ranks", "fewer ranks")
"""What is new about a size: its numbers within the measured range, its number of ranks, or one that lies beyond the
range. Each has errors of its own."""
REACH = {"tp_size": 1.2}
"""Doublings over which what the fit leaves of a time stays alike, if not `USUAL_REACH`."""
USUAL_REACH = 2.0
NOISE = 0.02
"""Part of what the fit leaves that is chance, as a share of its variance."""
PRIOR = 3
"""Cells as which the errors of all variants together count beside those of a variant."""
LEAST_ERROR = 0.01
OTHER_GPU_ERROR = 0.3
"""Error of a time on another GPU. Of 37 cells of plain torch, Liger and flash-attention on an H100 and an H200, 34 lie
within it."""
TIMES = ("time_ms", "device_ms")
COUNTED = ("peak_gib", "bytes_communicated")
TOLERANCE = 1e-3
"""Share of a problem's terms that may lie outside what the measured cells determine."""
LARGEST_ERROR = 0.5
"""A number with a larger relative error is called unknown."""

_Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Fit:
    """A fitted sum of terms."""

    coefficients: Mapping[str, float]
    scales: _Array
    """The largest measured value of each term, because times and bytes stand side by side."""
    determined: _Array
    """(directions, terms): an orthonormal basis of the scaled terms of the measured cells."""

    def __call__(self, terms: Terms, slowdown: float = 1.0, *, likely: bool = False) -> float | None:
        """Return the sum, or None if the measured cells do not determine it.

        A sum is determined if its terms are a combination of the terms of measured cells. For example, rows of a
        single tp size don't tell how the latency of collectives grows. A `likely` sum need only have terms that some
        cells have. `slowdown` multiplies the terms that a GPU's memory bandwidth limits.
        """
        terms = {name: value for name, value in terms.items() if value}
        if terms.keys() - self.coefficients.keys():
            return None
        scaled = np.array([terms.get(name, 0.0) for name in self.coefficients]) / self.scales
        rest = scaled - self.determined.T @ (self.determined @ scaled)
        if not likely and np.linalg.norm(rest) > TOLERANCE * np.linalg.norm(scaled):
            return None
        speeds = {name: slowdown if name.startswith("bytes") else 1.0 for name in terms}
        return sum(self.coefficients[name] * value * speeds[name] for name, value in terms.items())


def fit(cells: Sequence[Terms], values: Sequence[float], explained: Sequence[float] | float = 0.0) -> Fit:
    """Fit by least squares of the relative error, with coefficients of at least zero.

    `explained` is the part of each value that the terms need not explain.
    """
    names = list(dict.fromkeys(name for terms in cells for name, value in terms.items() if value))
    if not names:
        return Fit({}, np.ones(0), np.zeros((0, 0)))
    matrix: _Array = np.array([[terms.get(name, 0.0) for name in names] for terms in cells])
    scales = np.abs(matrix).max(axis=0)
    weights = 1 / np.maximum(np.asarray(values), 1e-9)
    targets = (np.asarray(values) - explained) * weights
    solution, _ = optimize.nnls(matrix / scales * weights[:, None], targets, maxiter=100 * len(names))
    _, singular, directions = np.linalg.svd(matrix / scales, full_matrices=False)
    coefficients = dict(zip(names, (solution / scales).tolist(), strict=True))
    return Fit(coefficients, scales, directions[singular > TOLERANCE * singular.max()])


@dataclass(frozen=True)
class Estimate:
    """A number with its error bar."""

    value: float
    error: float
    """As a share of the value. Infinite: the value is unknown."""

    @property
    def low(self) -> float:
        return self.value / (1 + self.error)

    @property
    def high(self) -> float:
        return self.value * (1 + self.error)

    @property
    def known(self) -> bool:
        """False if the error bar is so wide that the value says nothing."""
        return self.error <= LARGEST_ERROR


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a variant on one problem. A number that the measured cells do not determine is unknown."""

    label: str
    size: LossSize
    time_ms: Estimate | None
    """None: withheld, because the bandwidth of the GPU in question is not known. So is the next one."""
    device_ms: Estimate | None
    bytes_communicated: float | None
    """None: unknown."""
    peak_gib: Estimate
    ran_out: Sequence[tuple[float, float]] = ()
    """The predicted need, inputs included, of each measured cell that ran out of memory, and the memory that it had."""
    beyond: Mapping[str, float] = field(default_factory=dict)
    """The factor by which each field of the size lies outside the measured range."""
    cells: int = 0
    """Measured cells of the variant."""

    @property
    def needed_gib(self) -> float:
        """Predicted need, inputs included."""
        return float(self.size.inputs_gib) + self.peak_gib.value

    def memory(self, free_gib: float) -> tuple[str, str | None]:
        """Return `fits`, `OOM`, `unknown`, or `tight` if the error bar includes both, and a reason or None.

        It is `OOM`, with a reason, if a measured cell of the variant with no larger need ran out of as much memory.
        """
        low, high = (self.size.inputs_gib + bound for bound in (self.peak_gib.low, self.peak_gib.high))
        if not self.peak_gib.known or low > free_gib:
            return "OOM" if self.peak_gib.known else "unknown", None
        for needed_gib, gpu_gib in self.ran_out:
            if needed_gib <= self.needed_gib and free_gib <= (gpu_gib - RESERVE_GIB) * (1 + SAME_SHARE):
                return "OOM", (
                    f"it needs {amount(self.needed_gib, 'GiB')} with its inputs, and a measured cell that needs "
                    f"{amount(needed_gib, 'GiB')} ran out of memory within {amount(gpu_gib, 'GiB')}"
                )
        return "tight" if high > free_gib else "fits", None


class VariantModel:
    """The fits of one variant's memory, sent bytes and times to measured cells."""

    def __init__(self, label: str, cells: Sequence[MeasuredCell]) -> None:
        self.label, self.cells = label, tuple(cells)
        self.left_out = pd.DataFrame()
        """The result of `leave_out`."""
        self.errors: Mapping[tuple[str, str], float] = {}
        """Relative errors by kind and quantity, from `calibrated_errors`."""
        self.ran_out: Sequence[tuple[float, float]] = ()
        """As in `Prediction`."""
        counted = [(counts(label, cell.size), cell.row) for cell in cells]
        self.memory = _fit([(count.memory, row["peak_gib"]) for count, row in counted])
        self.sent = _fit([(count.sent, row["bytes_communicated"]) for count, row in counted if count.sent])
        self.device = _fit([(count.time, row["device_ms"]) for count, row in counted])
        both = [cell for cell in cells if cell.row["time_ms"] is not None and cell.row["device_ms"] is not None]
        device_ms = [self.device(counts(label, cell.size).time, likely=True) or 0.0 for cell in both]
        self.host = fit([_host_terms(cell.size) for cell in both], [cell.row["time_ms"] for cell in both], device_ms)
        self.left = {name: self._left(name) for name in TIMES}

    def _left(self, name: str) -> tuple[Sequence[Any], _Array]:
        """Return the sizes that were timed, with the weights by which what the fit leaves of them is interpolated."""
        timed = [(cell.size, cell.row[name], self._fitted(name, cell.size)) for cell in self.cells]
        logs = {size: math.log(value / fitted) for size, value, fitted in timed if value and fitted}
        likeness = np.array([[_likeness(one, other) for other in logs] for one in logs]).reshape(len(logs), -1)
        return [*logs], np.linalg.solve(likeness + NOISE * np.eye(len(logs)), [*logs.values()]) if logs else np.zeros(0)

    def _fitted(self, name: str, size: LossSize, slowdown: float = 1.0) -> float | None:
        """Return the fitted part of a time, or None without measured cells of its loss, or over as few ranks."""
        device_ms = self.device(counts(self.label, size).time, slowdown, likely=True)
        host_ms = self.host(_host_terms(size), likely=True)
        if name == "device_ms" or device_ms is None:
            return device_ms
        return None if host_ms is None else device_ms + host_ms

    def value(self, name: str, size: LossSize, slowdown: float = 1.0) -> float | None:
        """Return one of `TIMES` or `COUNTED`, or None if the cells do not determine it.

        `slowdown` multiplies times that a GPU's memory bandwidth limits.
        """
        count = counts(self.label, size)
        if name == "peak_gib":
            return self.memory(count.memory)
        if name == "bytes_communicated":
            return self.sent(count.sent)
        if (fitted := self._fitted(name, size, slowdown)) is None:
            return None
        sizes, weights = self.left[name]
        return fitted * math.exp(sum(_likeness(size, at) * weight for at, weight in zip(sizes, weights, strict=True)))

    def error(self, name: str, size: LossSize) -> float:
        """Return the relative error of a quantity. It is infinite if no left-out cell tells it."""
        return self.errors.get((kind_of(self.cells, size), name), math.inf) * _stretch(self.cells, size)

    def __call__(self, size: LossSize, slowdown: float | None = 1.0) -> Prediction:
        """Return the prediction for a size. Problems of its kind must have been measured.

        `slowdown` is the memory bandwidth of the measured GPU over that of the GPU in question. None withholds times.
        """
        values = {name: self.value(name, size, slowdown or 1.0) for name in (*TIMES, *COUNTED)}
        errors = {name: self.error(name, size) for name in (*TIMES, "peak_gib")}
        if slowdown != 1.0:
            errors |= {name: math.hypot(errors[name], OTHER_GPU_ERROR) for name in TIMES}
        errors |= {name: math.inf for name in errors if values[name] is None}
        estimates = {name: Estimate(values[name] or 0.0, error) for name, error in errors.items()}
        times = estimates if slowdown else {}
        return Prediction(
            self.label, size, times.get("time_ms"), times.get("device_ms"), values["bytes_communicated"],
            estimates["peak_gib"], self.ran_out, extrapolation_factors(self.cells, size), len(self.cells),
        )  # fmt: skip


def _likeness(one: LossSize, other: LossSize) -> float:
    """Return how alike what the fit leaves of the times of two sizes is, from 0 to 1."""
    distance = 0.0 if one.kind == other.kind else 1.0
    for name, value in vars(one).items():
        if isinstance(value, int):
            distance += (math.log2(value / getattr(other, name)) / REACH.get(name, USUAL_REACH)) ** 2
    return math.exp(-distance / 2)


def kind_of(cells: Sequence[MeasuredCell], size: LossSize) -> str:
    """Return which of `KINDS` a size is, beside measured cells."""
    alike = [cell.size for cell in cells if cell.size.kind == size.kind]
    ranks = {other.tp_size for other in alike}
    if size.tp_size not in ranks:
        if ranks and size.tp_size > max(ranks):
            return "more ranks"
        return "ranks" if ranks and size.tp_size > min(ranks) else "fewer ranks"
    names = [name for name, value in vars(size).items() if isinstance(value, int)]
    ranges = [(name, [getattr(other, name) for other in alike]) for name in names]
    within = all(min(values) <= getattr(size, name) <= max(values) for name, values in ranges)
    return "size" if within else "far size"


def _fit(pairs: Sequence[tuple[Terms, float | None]]) -> Fit:
    known = [(terms, value) for terms, value in pairs if value is not None]
    return fit([terms for terms, _ in known], [value for _, value in known])


def _host_terms(size: LossSize) -> Terms:
    """Return the terms of the host's part: a constant, and over several ranks one that grows with their doublings."""
    ranks = size.tp_size
    return {"host launches": 1.0} | ({"host collectives": math.log2(2 * ranks)} if ranks > 1 else {})


def extrapolation_factors(cells: Sequence[MeasuredCell], size: LossSize) -> dict[str, float]:
    """Return the factor by which each field of the size lies outside the measured range. Fields within are left out."""
    factors = {}
    for name, value in vars(size).items():
        known = [getattr(cell.size, name) for cell in cells]
        if isinstance(value, int) and not min(known) <= value <= max(known):
            factors[name] = max(value / max(known), min(known) / value)
    return factors


def _stretch(cells: Sequence[MeasuredCell], size: LossSize) -> float:
    """Return by how much the error grows beyond the measured range: once more with each doubling."""
    return 1 + sum(map(math.log2, extrapolation_factors(cells, size).values()))


def models(measured: MeasuredCells) -> dict[str, VariantModel]:
    """Return a model for each variant that was measured often enough, most measured first."""
    by_label = {}
    for label, _ in Counter(cell.label for cell in measured.cells if cell.row["status"] == "ok").most_common():
        of_label = [cell for cell in measured.cells if cell.label == label]
        cells = [cell for cell in of_label if cell.row["status"] == "ok"]
        if len({cell.size for cell in cells}) >= MIN_SIZES and any(cell.row["peak_gib"] is not None for cell in cells):
            model = by_label[label] = VariantModel(label, cells)
            model.left_out = leave_out(cells)
            model.ran_out = [
                (float(cell.size.inputs_gib) + peak, limit_gib)
                for cell in of_label
                if cell.row["status"] == "oom" and (limit_gib := cell.row["memory_limit_gib"] or measured.memory_gib)
                if (peak := model.value("peak_gib", cell.size)) is not None
            ]
    for model in by_label.values():
        model.errors = calibrated_errors(model.left_out, [each.left_out for each in by_label.values()])
    return by_label


def leave_out(cells: Sequence[MeasuredCell]) -> pd.DataFrame:
    """Return the relative errors of each quantity, a line for each cell that cells of other sizes or ranks predict.

    `axis` and `group` say what was left out, `kind` and `stretch` how far the cell then lies from the others. An error
    is missing if it is unknown.
    """
    lines = []
    for axis in ("size", "tp"):
        groups = defaultdict(set)
        for size in (cell.size for cell in cells):
            groups[size.tp_size if axis == "tp" else (size.tokens, getattr(size, "vocab", 0))].add(size)
        for at, group in enumerate(groups.values()):
            others = [cell for cell in cells if cell.size not in group]
            if not any(cell.row["peak_gib"] is not None for cell in others):
                continue
            model = VariantModel(cells[0].label, others)
            for cell in (cell for cell in cells if cell.size in group):
                pairs = {name: (model.value(name, cell.size), cell.row[name]) for name in (*TIMES, *COUNTED)}
                logs = {name: abs(math.log(one / other)) for name, (one, other) in pairs.items() if one and other}
                place = {"kind": kind_of(others, cell.size), "stretch": _stretch(others, cell.size)}
                errors = {name: math.expm1(log) for name, log in logs.items()}
                lines.append({"axis": axis, "group": at, **place, **errors})
    names = [*TIMES, *COUNTED]
    return pd.DataFrame(lines, columns=["axis", "group", "kind", "stretch", *names]).astype(dict.fromkeys(names, float))


def calibrated_errors(own: pd.DataFrame, of_all: Iterable[pd.DataFrame]) -> dict[tuple[str, str], float]:
    """Return the error of each kind and quantity within which `ERROR_BAR_SHARE` of left-out cells lie.

    A variant has too few cells to tell. So its errors are those of all variants, in units of what single sizes miss in
    a variant that were left out.
    """
    frames = [frame for frame in of_all if not frame.empty]
    errors = {}
    for name in (*TIMES, *COUNTED):
        of_sizes = [frame.loc[frame["kind"] == "size", name].dropna() for frame in frames]
        usual = float(pd.concat(of_sizes).quantile(0.7)) if frames else math.nan
        units = [
            (frame[name] / frame["stretch"] / max(_usual_error(sizes, usual), 1e-9)).groupby(frame["kind"])
            for frame, sizes in zip(frames, of_sizes, strict=True)
        ]
        own_error = _usual_error(own.loc[own["kind"] == "size", name].dropna(), usual)
        for kind in KINDS:
            found = [of_kind.get_group(kind).dropna() for of_kind in units if kind in of_kind.groups]
            if count := sum(map(len, found)):
                share = min(1.0, ERROR_BAR_SHARE * (count + 1) / count)  # of few cells, one more may lie beyond all
                errors[kind, name] = max(LEAST_ERROR, own_error * float(pd.concat(found).quantile(share, "higher")))
        errors.setdefault(("ranks", name), errors.get(("more ranks", name), math.inf))
    return errors


def _usual_error(of_sizes: "pd.Series[float]", usual: float) -> float:
    """Return what a variant misses in sizes that were left out, beside what all variants usually miss."""
    return float(np.sqrt((PRIOR * usual**2 + (of_sizes**2).sum()) / (PRIOR + len(of_sizes))))
