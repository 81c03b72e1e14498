"""A variant's model: what it counts, fitted to measured cells, with errors on cells that were left out.

The counts come from the cost model of the entropy loss. A wall time is the device time and what the host adds, which
depends on launches and ranks, not on bytes. Between measured sizes a time follows the measured cells nearby: what the
fit leaves at each of them is interpolated (kriging).
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import interpolate, optimize

from tpbench.predict.cells import MeasuredCell, MeasuredCells, slowdown_of
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
COUNTS = {"peak_gib": "memory", "bytes_communicated": "sent", "device_ms": "time"}
"""The terms to which each quantity is fitted, as `Counts` names them."""
AXES: Mapping[str, Callable[[MeasuredCell], object]] = {
    "size": lambda cell: (cell.size.tokens, cell.size.vocab),
    "number of ranks": lambda cell: cell.size.tp_size,
    "loss": lambda cell: cell.size.kind,
    "host": lambda cell: cell.row["host"],
}
"""What is left out to see how well other cells predict it. All cells of a variant with the same value are."""
GPU = "GPU"
"""The axis of cells on other GPU models than the one that the models are fitted to."""


class Fit:
    """A sum of terms, fitted by least squares of the relative error, with coefficients of at least zero."""

    def __init__(self, pairs: Sequence[tuple[Terms, float | None]]) -> None:
        known = [(terms, value) for terms, value in pairs if value is not None]
        names = list(dict.fromkeys(name for terms, _ in known for name, value in terms.items() if value))
        matrix = [[terms.get(name, 0.0) for name in names] for terms, _ in known]
        self.measured = np.array(matrix).reshape(len(known), len(names))  # (cells, terms)
        scales = self.measured.max(axis=0, initial=0.0)
        shares = self.measured / scales / np.maximum([value for _, value in known], 1e-9)[:, None]
        for at, share in enumerate(shares.T):  # of terms that are proportional in all cells the first one counts
            if any(np.allclose(share, other, atol=0.0) for other in shares.T[:at]):
                shares[:, at] = 0.0
        solution = optimize.nnls(shares, np.ones(len(known)), maxiter=100 * len(names))[0] if names else scales
        self.coefficients: dict[str, float] = dict(zip(names, (solution / scales).tolist(), strict=True))

    def __call__(self, terms: Terms, slowdown: float = 1.0) -> float | None:
        """Return the sum, with `slowdown` times the terms of bytes. None: no measured cell has one of the terms."""
        terms = {name: value * (slowdown if name.startswith("bytes") else 1) for name, value in terms.items() if value}
        if terms.keys() - self.coefficients.keys():
            return None
        return sum(self.coefficients[name] * value for name, value in terms.items())

    def determines(self, terms: Terms) -> bool:
        """Return true if terms are a combination of measured ones. Cells of one size don't tell tokens from vocab."""
        scales = self.measured.max(axis=0, initial=1e-9)
        rows = np.vstack([self.measured, [terms.get(name, 0.0) for name in self.coefficients]]) / scales
        rows /= np.linalg.norm(rows, axis=1, keepdims=True) + 1e-9
        return bool(np.linalg.matrix_rank(rows[:-1], 1e-3) == np.linalg.matrix_rank(rows, 1e-3))


@dataclass(frozen=True)
class Estimate:
    """A number with its error bar."""

    value: float
    error: float  # as a share of the value; infinite: the value is unknown

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
    estimates: Mapping[str, Estimate]  # by the names of `TIMES`, if the bandwidth of the GPU is known, and `COUNTED`

    @property
    def time(self) -> tuple[str, Estimate] | None:
        """The name and the estimate of the device time, or if that is unknown of the wall time, or None."""
        times = [(name, self.estimates[name]) for name in reversed(TIMES) if name in self.estimates]
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
        self.label, self.cells, self.kinds = label, tuple(cells), sorted({cell.size.kind for cell in cells})
        self.errors: Mapping[Any, float] = {}  # relative ones by kind and quantity, from `pooled_errors`
        self.fits = {
            name: Fit([(getattr(counts(label, cell.size), kind), cell.row[name]) for cell in cells])
            for name, kind in COUNTS.items()
        }
        self.hosts = {several: self._host_of(several) for several in (False, True)}
        """How long the host launches, and what a wall time has on top: of one rank (False), and of several (True)."""
        self.left = {name: self._interpolator(name) for name in TIMES}
        """What the fit leaves of the logarithm of a time, by the position of a size. None: no cell was timed."""

    def _host_of(self, several: bool) -> tuple[float, float] | None:
        """Return the median time of all launches, 0 if no row has it, and of what a wall time has on top."""
        cells = [cell for cell in self.cells if (cell.size.tp_size > 1) == several]
        known_ms = [ms for cell in cells if (ms := cell.row.get("launch_ms")) is not None]
        launches = statistics.median(known_ms or [0.0])
        pairs = [(cell.row["time_ms"], self._fitted_ms("device_ms", cell.size)) for cell in cells]
        # The host launches kernels while the device works. So a wall time is the longer of both, and a rest.
        rests = [wall_ms - max(launches, own_ms) for wall_ms, own_ms in pairs if wall_ms and own_ms is not None]
        return (launches, max(0.0, statistics.median(rests))) if rests else None

    def _interpolator(self, name: str) -> interpolate.RBFInterpolator | None:
        fitted_ms = [(cell, self._fitted_ms(name, cell.size)) for cell in self.cells if cell.row[name]]
        pairs = [(self._position(name, cell.size), math.log(cell.row[name] / ms)) for cell, ms in fitted_ms if ms]
        options = {"kernel": "gaussian", "epsilon": math.sqrt(0.5), "smoothing": NOISE, "degree": -1}
        return interpolate.RBFInterpolator(*map(np.array, zip(*pairs, strict=True)), **options) if pairs else None

    def _position(self, name: str, size: LossSize) -> list[float]:
        """Return where a size lies. What the fit leaves is alike within a distance of about 1."""
        kinds = [(size.kind == kind) * math.sqrt(0.5) for kind in self.kinds]
        # What the host of one rank adds says nothing about that of several ranks, which also launches collectives.
        return [*scaled(size), *kinds, 10.0 * (name == "time_ms" and size.tp_size > 1)]

    def _fitted_ms(self, name: str, size: LossSize, slowdown: float = 1.0) -> float | None:
        """Return the fitted part of a time, or None without measured cells of its loss, or over as few ranks."""
        device_ms = self.fits["device_ms"](counts(self.label, size).time, slowdown)
        if name == "device_ms" or device_ms is None:
            return device_ms
        host = self.hosts[size.tp_size > 1]
        return max(host[0], device_ms) + host[1] if host else None

    def value(self, name: str, size: LossSize, slowdown: float = 1.0) -> float | None:
        """Return one of `TIMES` or `COUNTED`, or None if the cells do not determine it."""
        if name in COUNTED:
            terms = getattr(counts(self.label, size), COUNTS[name])
            return self.fits[name](terms) if self.fits[name].determines(terms) else None
        if (fitted := self._fitted_ms(name, size, slowdown)) is None:
            return None
        left = self.left[name]
        return fitted * math.exp(left([self._position(name, size)])[0]) if left else fitted

    def __call__(self, size: LossSize, slowdown: float | None = 1.0) -> Prediction:
        """Return the prediction for a size on a GPU with that `Target.slowdown`."""
        kind, stretch = place_of(self.cells, size)
        estimates = {}
        for name in (*TIMES, *COUNTED) if slowdown else COUNTED:
            value = self.value(name, size, slowdown or 1.0)
            error = error_bar(self.errors, name, kind, stretch, slowdown != 1.0)
            estimates[name] = Estimate(0.0, math.inf) if value is None else Estimate(value, error)
        return Prediction(self, size, estimates)


def scaled(size: LossSize) -> np.ndarray[Any, Any]:
    """Return the logarithms of a size, each in units of its `REACH`."""
    return np.array([math.log2(getattr(size, name)) / reach for name, reach in REACH.items()])


def place_of(cells: Sequence[MeasuredCell], size: LossSize) -> tuple[str, float]:
    """Return what is new about a size beside measured cells, and the factor by which its error grows with distance.

    What is new is the loss, the `size`, or the number of ranks: `ranks between` those of cells of the loss, `one rank`,
    `fewer ranks` or `more ranks`. Outside the measured range the error grows once more with each `REACH`.
    """
    alike = [cell.size for cell in cells if cell.size.kind == size.kind]
    if not alike:
        return "loss", 1.0
    position, others = scaled(size), np.array([*map(scaled, alike)])
    beyond = np.clip([position - others.max(axis=0), others.min(axis=0) - position], 0.0, None)
    stretch, ranks = 1 + float(np.linalg.norm(beyond)), {other.tp_size for other in alike}
    if size.tp_size in ranks or size.tp_size == 1:
        return "size" if size.tp_size in ranks else "one rank", stretch
    beyond_ranks = ("fewer ranks", "ranks between", "more ranks")
    return beyond_ranks[(size.tp_size > min(ranks)) + (size.tp_size > max(ranks))], stretch


def models(measured: MeasuredCells) -> tuple[dict[str, VariantModel], pd.DataFrame]:
    """Return a model for each variant that was measured often enough, most measured first, and what `leave_out` found.

    Cells on other GPUs are predicted, too, as if they had been left out.
    """
    found = {}
    for label, _ in Counter(cell.label for cell in measured.cells).most_common():
        cells = [cell for cell in measured.cells if cell.label == label]
        if len({cell.size for cell in cells}) >= MIN_SIZES:
            found[label] = VariantModel(label, cells)
    lines = [line for model in found.values() for line in leave_out(model)]
    for cell in measured.on_other_gpus:
        if cell.label in found and (slowdown := slowdown_of(measured.gpu, gpu := cell.row["gpu_name"])):
            lines += _errors(found[cell.label], cell, GPU, gpu, slowdown)
    left_out = pd.DataFrame(lines, columns=["label", "axis", "group", "kind", "stretch", "name", "error"])
    for model in found.values():
        model.errors = pooled_errors(left_out)
    return found, left_out


def leave_out(model: VariantModel) -> list[tuple[Any, ...]]:
    """Return the errors of each cell if it and all cells with its value on an axis are left out of the model."""
    lines = []
    for axis, value_of in AXES.items():
        values = dict.fromkeys(map(value_of, model.cells))
        for value in values if len(values) > 1 else ():
            others = VariantModel(model.label, [cell for cell in model.cells if value_of(cell) != value])
            for cell in (cell for cell in model.cells if value_of(cell) == value):
                lines += _errors(others, cell, axis, str(value))
    return lines


def _errors(
    model: VariantModel, cell: MeasuredCell, axis: str, value: str, slowdown: float = 1.0
) -> list[tuple[Any, ...]]:
    """Return a line with the relative error, or infinity, for each quantity of a cell that was not fitted to."""
    place, lines = place_of(model.cells, cell.size), []
    for name in (*TIMES, *COUNTED):
        if true := cell.row[name]:
            predicted = model.value(name, cell.size, slowdown)
            error = math.exp(abs(math.log(predicted / true))) - 1 if predicted else math.inf
            lines.append((model.label, axis, value, *place, name, error))
    return lines


def pooled_errors(left_out: pd.DataFrame) -> dict[Any, float]:
    """Return the error of each kind and quantity within which `ERROR_BAR_SHARE` of the left-out cells lie.

    A single variant has too few cells to tell it, so the cells of all variants count, on the GPU of the models.
    Those of one rank, from cells of several, count for none: a plain gather's are off by 1.3 times, kernels' by 0.1.
    """
    errors = {}
    usable = (left_out["axis"] != GPU) & (left_out["error"] < math.inf) & (left_out["kind"] != "one rank")
    for key, lines in left_out[usable].groupby(["kind", "name"]):
        share = min(1.0, ERROR_BAR_SHARE * (len(lines) + 1) / len(lines))  # of few cells, one more may lie beyond all
        errors[key] = max(LEAST_ERROR, float((lines["error"] / lines["stretch"]).quantile(share, "higher")))
    return errors


def error_bar(errors: Mapping[Any, float], name: str, kind: str, stretch: float, on_other_gpu: bool) -> float:
    """Return the relative error that a prediction may have. Infinite: unknown."""
    error = errors.get((kind, name), math.inf) * stretch
    return math.hypot(error, OTHER_GPU_ERROR) if on_other_gpu and name in TIMES else error
