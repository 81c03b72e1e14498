"""A variant's model: what it counts, fitted to measured cells, with errors on cells that were left out.

The counts come from the cost model of the entropy loss. A wall time is the device time and what the host adds. The
host's part depends on launches and ranks, not on bytes: a fit of wall times with terms of bytes would mistake
differences between hosts for bytes.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy import optimize

from tpbench.predict.cells import MeasuredCell, MeasuredCells
from tpbench.predict.target import RESERVE_GIB, SAME_SHARE
from tpbench.report.analysis.metrics import number
from tpbench.workloads.entropy_loss.cost_model import LossSize, Terms, counts

MIN_SIZES = 4
"""A variant with fewer measured sizes is not predicted."""
ERROR_BAR_SHARE = 0.9
"""Share of the left-out cells that lie within an error bar."""
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

    def __call__(self, terms: Terms, slowdown: float = 1.0) -> float | None:
        """Return the sum, or None if the measured cells do not determine it.

        A sum is determined if its terms are a combination of the terms of measured cells. For example, rows of a
        single tp size don't tell how the latency of collectives grows. `slowdown` multiplies the terms that a GPU's
        memory bandwidth limits.
        """
        terms = {name: value for name, value in terms.items() if value}
        if terms.keys() - self.coefficients.keys():
            return None
        scaled = np.array([terms.get(name, 0.0) for name in self.coefficients]) / self.scales
        rest = scaled - self.determined.T @ (self.determined @ scaled)
        if np.linalg.norm(rest) > TOLERANCE * np.linalg.norm(scaled):
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
    """None: withheld, because the bandwidth of the GPU in question is not known. So are the next two."""
    device_ms: Estimate | None
    communication_ms: Estimate | None
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
                    f"it needs {number(self.needed_gib)} GiB with its inputs, and a measured cell that needs "
                    f"{number(needed_gib)} GiB ran out of memory within {number(gpu_gib)} GiB"
                )
        return "tight" if high > free_gib else "fits", None


class VariantModel:
    """The fits of one variant's memory, sent bytes and times to measured cells, with their errors."""

    def __init__(self, label: str, cells: Sequence[MeasuredCell]) -> None:
        self.label, self.cells = label, tuple(cells)
        self.errors = pd.DataFrame(columns=[*TIMES, *COUNTED], dtype=float)
        """Relative errors of the cells, each left out of the fit: the result of `leave_out`."""
        self.ran_out: Sequence[tuple[float, float]] = ()
        """As in `Prediction`."""
        counted = [(counts(label, cell.size), cell.row) for cell in cells]
        self.memory = _fit([(count.memory, row["peak_gib"]) for count, row in counted])
        self.sent = _fit([(count.sent, row["bytes_communicated"]) for count, row in counted if count.sent])
        self.device = _fit([(count.time, row["device_ms"]) for count, row in counted])
        both = [cell for cell in cells if cell.row["time_ms"] is not None and cell.row["device_ms"] is not None]
        device_ms = [self.device(counts(label, cell.size).time) or 0.0 for cell in both]
        self.host = fit([_host_terms(cell.size) for cell in both], [cell.row["time_ms"] for cell in both], device_ms)

    def value(self, name: str, size: LossSize, slowdown: float = 1.0) -> float | None:
        """Return one of `TIMES` or `COUNTED`, or `communication_ms`, or None if the cells do not determine it.

        `slowdown` multiplies times that a GPU's memory bandwidth limits.
        """
        count = counts(self.label, size)
        if name == "peak_gib":
            return self.memory(count.memory)
        if name == "bytes_communicated":
            return self.sent(count.sent)
        if name == "communication_ms":  # the part of the device time that the collectives take
            collectives = {term: value for term, value in count.time.items() if term.startswith("collective")}
            return (self.device(collectives, slowdown) or None) if collectives else 0.0
        device_ms, host_ms = self.device(count.time, slowdown), self.host(_host_terms(size))
        if name == "device_ms" or device_ms is None:
            return device_ms
        return None if host_ms is None else device_ms + host_ms

    def __call__(self, size: LossSize, slowdown: float | None = 1.0) -> Prediction:
        """Return the prediction for a size. Problems of its kind must have been measured.

        `slowdown` is the memory bandwidth of the measured GPU over that of the GPU in question. None withholds times.
        """
        beyond = extrapolation_factors(self.cells, size)
        stretch = 1 + sum(map(math.log2, beyond.values()))
        known = self.errors.quantile(ERROR_BAR_SHARE).fillna(1.0)
        errors = {name: stretch * float(known[name]) for name in (*TIMES, "peak_gib")}
        values = {name: self.value(name, size, slowdown or 1.0) for name in (*TIMES, *COUNTED, "communication_ms")}
        # No row has the time of the collectives alone: all of the device time's error may be theirs.
        part, whole = values["communication_ms"], values["device_ms"]
        errors["communication_ms"] = errors["device_ms"] * (whole or math.inf) / part if part else 0.0
        errors |= {name: math.inf for name in errors if values[name] is None}
        estimates = {name: Estimate(values[name] or 0.0, error) for name, error in errors.items()}
        times = estimates if slowdown else {}
        return Prediction(
            self.label, size, times.get("time_ms"), times.get("device_ms"), times.get("communication_ms"),
            values["bytes_communicated"], estimates["peak_gib"], self.ran_out, beyond, len(self.cells),
        )  # fmt: skip


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


def models(measured: MeasuredCells) -> dict[str, VariantModel]:
    """Return a model for each variant that was measured often enough, most measured first."""
    by_label = {}
    for label, _ in Counter(cell.label for cell in measured.cells if cell.row["status"] == "ok").most_common():
        of_label = [cell for cell in measured.cells if cell.label == label]
        cells = [cell for cell in of_label if cell.row["status"] == "ok"]
        if len({cell.size for cell in cells}) >= MIN_SIZES and any(cell.row["peak_gib"] is not None for cell in cells):
            model = by_label[label] = VariantModel(label, cells)
            model.errors = leave_out(cells)
            model.ran_out = [
                (float(cell.size.inputs_gib) + peak, limit_gib)
                for cell in of_label
                if cell.row["status"] == "oom" and (limit_gib := cell.row["memory_limit_gib"] or measured.memory_gib)
                if (peak := model.value("peak_gib", cell.size)) is not None
            ]
    return by_label


def leave_out(cells: Sequence[MeasuredCell], groups: Sequence[Collection[Any]] = ()) -> pd.DataFrame:
    """Return the relative errors of each quantity, a line for each cell. An error is missing if it is unknown.

    Each group of sizes is predicted from the cells of other sizes. Without groups, each size is one.
    """
    lines = []
    for group in groups or [{size} for size in dict.fromkeys(cell.size for cell in cells)]:
        others = [cell for cell in cells if cell.size not in group]
        if any(cell.row["peak_gib"] is not None for cell in others):
            model = VariantModel(cells[0].label, others)
            for cell in (cell for cell in cells if cell.size in group):
                found = {name: (model.value(name, cell.size), cell.row[name]) for name in (*TIMES, *COUNTED)}
                known = {name: pair for name, pair in found.items() if pair[0] is not None and pair[1]}
                lines.append({name: abs(predicted / truth - 1) for name, (predicted, truth) in known.items()})
    return pd.DataFrame(lines, columns=[*TIMES, *COUNTED], dtype=float)
