"""A variant's model: what it counts, fitted to measured cells, with errors on cells that were left out.

The counts come from the cost model of the entropy loss. A wall time is the device time and what the host adds, which
depends on launches and ranks, not on bytes. Between measured sizes a time follows the measured cells nearby: what the
fit leaves at each of them is interpolated (kriging).
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize

from tpbench.predict.cells import MeasuredCell, MeasuredCells
from tpbench.workloads.entropy_loss.cost_model import LossSize, Terms, counts

MIN_SIZES = 4
"""A variant with fewer measured sizes is not predicted."""
ERROR_BAR_SHARE = 0.9
"""Share of the left-out cells that lie within an error bar."""
REACH = {"tp_size": 1.2, "tokens": 2.0, "vocab": 2.0}
"""Doublings over which what the fit leaves of a time stays alike."""
NOISE = 0.02
"""Part of what the fit leaves that is chance, as a share of its variance."""
LEAST_ERROR = 0.01
LARGEST_ERROR = 0.5
"""A number with a larger relative error is called unknown."""
OTHER_GPU_ERROR = 0.3
"""Error of a time on another GPU. Of 37 cells of plain torch, Liger and flash-attention on an H100 and an H200, 34 lie
within it."""
TIMES = ("time_ms", "device_ms")
COUNTED = ("peak_gib", "bytes_communicated")


@dataclass(frozen=True)
class Fit:
    """A fitted sum of terms."""

    coefficients: Mapping[str, float]
    measured: np.ndarray[Any, Any]
    """(cells, terms): the terms of the measured cells."""

    def __call__(self, terms: Terms, slowdown: float = 1.0) -> float | None:
        """Return the sum, or None if it has a term that no measured cell has.

        `slowdown` multiplies the terms that a GPU's memory bandwidth limits.
        """
        terms = {name: value for name, value in terms.items() if value}
        if terms.keys() - self.coefficients.keys():
            return None
        speeds = {name: slowdown if name.startswith("bytes") else 1.0 for name in terms}
        return sum(self.coefficients[name] * value * speeds[name] for name, value in terms.items())

    def determines(self, terms: Terms) -> bool:
        """Return true if the terms are a combination of those of measured cells.

        For example, cells of one size don't tell what grows with the tokens from what grows with the columns.
        """
        scales = self.measured.max(axis=0, initial=1e-9)
        rows = np.vstack([self.measured, [terms.get(name, 0.0) for name in self.coefficients]]) / scales
        rows /= np.linalg.norm(rows, axis=1, keepdims=True) + 1e-9
        return bool(np.linalg.matrix_rank(rows[:-1], 1e-3) == np.linalg.matrix_rank(rows, 1e-3))


def fit(pairs: Sequence[tuple[Terms, float | None]]) -> Fit:
    """Fit values to terms by least squares of the relative error, with coefficients of at least zero."""
    known = [(terms, value) for terms, value in pairs if value is not None]
    names = list(dict.fromkeys(name for terms, _ in known for name, value in terms.items() if value))
    matrix = np.array([[terms.get(name, 0.0) for name in names] for terms, _ in known])
    if not names:
        return Fit({}, matrix.reshape(len(known), 0))
    values = np.maximum([value for _, value in known], 1e-9)
    scales = matrix.max(axis=0)
    solution, _ = optimize.nnls(matrix / scales / values[:, None], np.ones(len(known)), maxiter=100 * len(names))
    return Fit(dict(zip(names, (solution / scales).tolist(), strict=True)), matrix)


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
    """Predicted cost of a variant on one problem."""

    model: "VariantModel"
    size: LossSize
    estimates: Mapping[str, Estimate]
    """By the names of `TIMES` and `COUNTED`. Times are missing if the bandwidth of the GPU in question isn't known."""

    @property
    def time(self) -> tuple[str, Estimate] | None:
        """The name and the estimate of the device time, or if that is unknown of the wall time, or None."""
        times = [(name, self.estimates[name]) for name in ("device_ms", "time_ms") if name in self.estimates]
        return next((pair for pair in times if pair[1].known), None)

    def memory(self, free_gib: float) -> str:
        """Return `fits`, `OOM`, `unknown`, or `tight` if the error bar includes both."""
        peak = self.estimates["peak_gib"]
        if not peak.known:
            return "unknown"
        low, high = (self.size.inputs_gib + bound for bound in (peak.low, peak.high))
        return "OOM" if low > free_gib else "tight" if high > free_gib else "fits"


class VariantModel:
    """The fits of one variant's memory, sent bytes and times to measured cells."""

    def __init__(self, label: str, cells: Sequence[MeasuredCell]) -> None:
        self.label, self.cells = label, tuple(cells)
        self.errors: Mapping[tuple[str, str], float] = {}
        """Relative errors by kind and quantity, from `pooled_errors`."""
        counted = [(counts(label, cell.size), cell.row) for cell in cells]
        self.fits = {
            "peak_gib": fit([(count.memory, row["peak_gib"]) for count, row in counted]),
            "bytes_communicated": fit([(count.sent, row["bytes_communicated"]) for count, row in counted]),
            "device_ms": fit([(count.time, row["device_ms"]) for count, row in counted]),
        }
        added = defaultdict(list)
        for cell in cells:
            device_ms = self.fits["device_ms"](counts(label, cell.size).time)
            if cell.row["time_ms"] is not None and device_ms is not None:
                added[cell.size.tp_size > 1].append(cell.row["time_ms"] - device_ms)
        self.host_ms = {several: max(0.0, statistics.median(times)) for several, times in added.items()}
        """What the host adds to a device time: of one rank (False), and of several (True)."""
        self.residuals = {name: self._residuals(name) for name in TIMES}

    def _residuals(self, name: str) -> dict[LossSize, float]:
        """Return weights of the sizes that were timed, by which what the fit leaves of them is interpolated."""
        timed = [(cell.size, cell.row[name], self._fitted_ms(name, cell.size)) for cell in self.cells]
        logs = {size: math.log(value / fitted) for size, value, fitted in timed if value and fitted}
        likeness = np.array([[_likeness(one, other) for other in logs] for one in logs]).reshape(len(logs), len(logs))
        weights = np.linalg.solve(likeness + NOISE * np.eye(len(logs)), np.array([*logs.values()]))
        return dict(zip(logs, weights.tolist(), strict=True))

    def _fitted_ms(self, name: str, size: LossSize, slowdown: float = 1.0) -> float | None:
        """Return the fitted part of a time, or None without measured cells of its loss, or over as few ranks."""
        device_ms = self.fits["device_ms"](counts(self.label, size).time, slowdown)
        host_ms = self.host_ms.get(size.tp_size > 1) if name == "time_ms" else 0.0
        return None if device_ms is None or host_ms is None else device_ms + host_ms

    def value(self, name: str, size: LossSize, slowdown: float = 1.0) -> float | None:
        """Return one of `TIMES` or `COUNTED`, or None if the cells do not determine it.

        `slowdown` multiplies times that a GPU's memory bandwidth limits.
        """
        if name in COUNTED:
            terms = counts(self.label, size).memory if name == "peak_gib" else counts(self.label, size).sent
            return self.fits[name](terms) if self.fits[name].determines(terms) else None
        if (fitted := self._fitted_ms(name, size, slowdown)) is None:
            return None
        return fitted * math.exp(sum(_likeness(size, at) * weight for at, weight in self.residuals[name].items()))

    def __call__(self, size: LossSize, slowdown: float | None = 1.0) -> Prediction:
        """Return the prediction for a size.

        `slowdown` is the memory bandwidth of the measured GPU over that of the GPU in question. None withholds times.
        """
        kind, stretch = place_of(self.cells, size)
        estimates = {}
        for name in (*TIMES, *COUNTED) if slowdown else COUNTED:
            value, error = self.value(name, size, slowdown or 1.0), self.errors.get((kind, name), math.inf) * stretch
            if slowdown != 1.0 and name in TIMES:
                error = math.hypot(error, OTHER_GPU_ERROR)
            estimates[name] = Estimate(0.0, math.inf) if value is None else Estimate(value, error)
        return Prediction(self, size, estimates)


def _likeness(one: LossSize, other: LossSize) -> float:
    """Return how alike what the fit leaves of the times of two sizes is, from 0 to 1."""
    doublings = [math.log2(getattr(one, name) / getattr(other, name)) / reach for name, reach in REACH.items()]
    return math.exp(-(sum(doubling**2 for doubling in doublings) + (one.kind != other.kind)) / 2)


def place_of(cells: Sequence[MeasuredCell], size: LossSize) -> tuple[str, float]:
    """Return what is new about a size beside measured cells, and the factor by which its error grows with distance.

    What is new is the loss, the `size`, or the number of ranks: `fewer ranks` than all cells of the loss, or `ranks`.
    Outside the measured range the error grows once more with each `REACH`.
    """
    alike = [cell.size for cell in cells if cell.size.kind == size.kind]
    if not alike:
        return "loss", 1.0
    beyond = []
    for name, reach in REACH.items():
        value, measured = getattr(size, name), [getattr(other, name) for other in alike]
        beyond.append(max(0.0, math.log2(value / max(measured)), math.log2(min(measured) / value)) / reach)
    stretch, ranks = 1 + math.hypot(*beyond), {other.tp_size for other in alike}
    if size.tp_size in ranks:
        return "size", stretch
    return "fewer ranks" if size.tp_size < min(ranks) else "ranks", stretch


def models(measured: MeasuredCells) -> tuple[dict[str, VariantModel], pd.DataFrame]:
    """Return a model for each variant that was measured often enough, most measured first, and `leave_out` of all."""
    by_label = defaultdict(list)
    for cell in measured.cells:
        by_label[cell.label].append(cell)
    found = {
        label: VariantModel(label, cells)
        for label, cells in sorted(by_label.items(), key=lambda item: -len(item[1]))
        if len({cell.size for cell in cells}) >= MIN_SIZES
    }
    left_out = pd.DataFrame([line for model in found.values() for line in leave_out(model)])
    for model in found.values():
        model.errors = pooled_errors(left_out)
    return found, left_out


def leave_out(model: VariantModel) -> list[dict[str, Any]]:
    """Return the relative errors of each quantity, a line for each cell that cells of other sizes or ranks predict.

    `axis` and `group` say what was left out, `kind` and `stretch` where the cell then lies, and `inside` whether that
    is within the measured range. An error is missing if it is unknown.
    """
    lines = []
    for axis, names in {"size": ("tokens", "vocab"), "tp": ("tp_size",)}.items():
        groups = defaultdict(list)
        for cell in model.cells:
            groups[tuple(getattr(cell.size, name) for name in names)].append(cell)
        for group, cells in groups.items():
            others = [cell for cell in model.cells if cell not in cells]
            other_model = VariantModel(model.label, others)
            for cell in cells:
                pairs = {name: (other_model.value(name, cell.size), cell.row[name]) for name in (*TIMES, *COUNTED)}
                errors = {
                    name: math.exp(abs(math.log(a / b))) - 1 if a and b else None for name, (a, b) in pairs.items()
                }
                kind, stretch = place_of(others, cell.size)
                place = {"kind": kind, "stretch": stretch, "inside": kind != "loss" and stretch == 1}
                lines.append({"label": model.label, "axis": axis, "group": group, **place, **errors})
    return lines


def pooled_errors(left_out: pd.DataFrame) -> dict[tuple[str, str], float]:
    """Return the error of each kind and quantity within which `ERROR_BAR_SHARE` of the left-out cells lie.

    A single variant has too few cells to tell it, so the cells of all variants count.
    """
    errors = {}
    for kind, lines in left_out.groupby("kind"):
        for name in (*TIMES, *COUNTED):
            if count := len(unit := (lines[name] / lines["stretch"]).dropna()):
                share = min(1.0, ERROR_BAR_SHARE * (count + 1) / count)  # of few cells, one more may lie beyond all
                errors[str(kind), name] = max(LEAST_ERROR, float(unit.quantile(share, "higher")))
    return errors
