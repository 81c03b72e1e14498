"""A variant's model: what it counts, fitted to measured cells, with errors on cells that were left out.

The counts come from the workload's cost model (`tpbench.workloads.cost_model`). A wall time is the device time and what
the host adds. The host's part depends on launches and ranks, not on bytes: a fit of wall times with terms of bytes
would mistake differences between hosts for bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from scipy import optimize

from tpbench.predict.cells import MeasuredCell, MeasuredCells
from tpbench.predict.memory import RESERVE_GIB, SAME_SHARE, Estimate
from tpbench.report.analysis.metrics import number
from tpbench.workloads.cost_model import CostModel, ProblemSize, Terms

MIN_SIZES = 4
"""A variant with fewer measured sizes is not predicted."""
ERROR_BAR_SHARE = 0.9
"""Share of the left-out cells that lie within an error bar."""
TIMES = ("time_ms", "device_ms")
COUNTED = ("peak_gib", "bytes_communicated")
TOLERANCE = 1e-3
"""Share of a problem's terms that may lie outside what the measured cells determine."""

_Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Fit:
    """A fitted sum of terms."""

    coefficients: Mapping[str, float]
    scales: Mapping[str, float]
    """The usual size of each term, because times and bytes stand side by side."""
    determined: _Array
    """(directions, terms): an orthonormal basis of the scaled terms of the measured cells."""

    def __call__(self, terms: Terms, slowdown: float = 1.0) -> float | None:
        """Return the sum, or None if the measured cells do not determine it.

        A sum is determined if its terms are a combination of the terms of measured cells. For example, rows of a
        single tp size don't tell how the latency of collectives grows. `slowdown` multiplies the terms that a GPU's
        memory bandwidth limits.
        """
        if any(value and not self.scales.get(name) for name, value in terms.items()):
            return None
        scaled = np.array([terms.get(name, 0.0) / scale if scale else 0.0 for name, scale in self.scales.items()])
        rest = scaled - self.determined.T @ (self.determined @ scaled)
        if np.linalg.norm(rest) > TOLERANCE * np.linalg.norm(scaled):
            return None
        return sum(
            self.coefficients[name] * value * (slowdown if name.startswith("bytes") else 1.0)
            for name, value in terms.items()
            if value
        )


def fit(cells: Sequence[Terms], values: Sequence[float], explained: Sequence[float] | None = None) -> Fit:
    """Fit by least squares of the relative error, with coefficients of at least zero.

    `explained` is the part of each value that the terms need not explain.
    """
    names = list(dict.fromkeys(name for terms in cells for name in terms))
    if not names:
        return Fit({}, {}, np.zeros((0, 0)))
    matrix: _Array = np.array([[terms.get(name, 0.0) for name in names] for terms in cells])
    measured = np.asarray(values, dtype=np.float64)
    weights = 1 / np.maximum(measured, 1e-9)
    scales = np.abs(matrix).max(axis=0)
    scaled = matrix / np.where(scales > 0, scales, 1.0)
    solution, _ = optimize.nnls(
        scaled * weights[:, None], (measured - (explained or 0.0)) * weights, maxiter=100 * len(names)
    )
    coefficients = solution / np.where(scales > 0, scales, 1.0)
    _, singular, directions = np.linalg.svd(scaled, full_matrices=False)
    determined = directions[singular > TOLERANCE * singular.max()]
    return Fit(
        dict(zip(names, coefficients.tolist(), strict=True)), dict(zip(names, scales.tolist(), strict=True)), determined
    )


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a variant on one problem. A number that the measured cells do not determine is unknown."""

    label: str
    size: Any
    """The problem's `ProblemSize`."""
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

    def memory_outcome(self, free_gib: float) -> str:
        """Return `fits`, `OOM`, `unknown`, or `tight` if the error bar includes both.

        It is `OOM` as well if a measured cell of the variant with no larger need ran out on a GPU with as much memory.
        """
        if not self.peak_gib.known:
            return "unknown"
        low, high = (self.size.inputs_gib + bound for bound in (self.peak_gib.low, self.peak_gib.high))
        return "OOM" if low > free_gib or self.memory_reason(free_gib) else "tight" if high > free_gib else "fits"

    def memory_reason(self, free_gib: float) -> str | None:
        """Return the measured cell that ran out of memory and needs no more than this one, if the prediction fits."""
        fits = self.size.inputs_gib + self.peak_gib.low <= free_gib
        for needed_gib, gpu_gib in self.ran_out:
            if fits and needed_gib <= self.needed_gib and free_gib <= (gpu_gib - RESERVE_GIB) * (1 + SAME_SHARE):
                return (
                    f"it needs {number(self.needed_gib)} GiB with its inputs, and a measured cell that needs "
                    f"{number(needed_gib)} GiB ran out of memory within {number(gpu_gib)} GiB"
                )
        return None


class Fits:
    """The fits of one variant's memory, sent bytes and times to measured cells."""

    def __init__(self, cost_model: CostModel, label: str, cells: Sequence[MeasuredCell]) -> None:
        self._counts = functools.partial(cost_model.counts, label)
        counts = {cell: self._counts(cell.size) for cell in cells}
        self.memory = _fit([(count.memory, cell.peak_gib) for cell, count in counts.items()])
        self.sent = _fit([(count.sent, cell.bytes_communicated) for cell, count in counts.items() if count.sent])
        self.device = _fit([(count.time, cell.device_ms) for cell, count in counts.items()])
        both = [cell for cell in cells if cell.time_ms is not None and cell.device_ms is not None]
        device_ms = [self.device(counts[cell].time) or 0.0 for cell in both]
        self.host = fit([_host_terms(cell.size) for cell in both], [cell.time_ms or 0.0 for cell in both], device_ms)

    def communication_ms(self, size: ProblemSize, slowdown: float = 1.0) -> float | None:
        """Return the part of the device time that the collectives take, or None if the cells do not show it."""
        terms = self._counts(size).time
        collectives = {name: value for name, value in terms.items() if name.startswith("collective")}
        return (self.device(collectives, slowdown) or None) if collectives else 0.0

    def __call__(self, name: str, size: ProblemSize, slowdown: float = 1.0) -> float | None:
        """Return one of `TIMES` or `COUNTED`. `slowdown` multiplies times that a GPU's memory bandwidth limits."""
        counts = self._counts(size)
        if name == "peak_gib":
            return self.memory(counts.memory)
        if name == "bytes_communicated":
            return self.sent(counts.sent)
        device_ms, host_ms = self.device(counts.time, slowdown), self.host(_host_terms(size))
        if name == "device_ms" or device_ms is None:
            return device_ms
        return None if host_ms is None else device_ms + host_ms


def _fit(pairs: Sequence[tuple[Terms, float | None]]) -> Fit:
    known = [(terms, value) for terms, value in pairs if value is not None]
    return fit([terms for terms, _ in known], [value for _, value in known])


def _host_terms(size: ProblemSize) -> Terms:
    """Return the terms of the host's part: a constant, and over several ranks one that grows with their doublings."""
    ranks = size.tp_size
    return {"host launches": 1.0} | ({"host collectives": math.log2(2 * ranks)} if ranks > 1 else {})


@dataclass(frozen=True)
class VariantModel:
    """One variant's fits, with their relative errors on cells that were left out."""

    label: str
    cells: tuple[MeasuredCell, ...]
    fits: Fits
    errors: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By quantity, those of cells that were left out one by one."""
    ran_out: Sequence[tuple[float, float]] = ()
    """As in `Prediction`."""

    @property
    def kinds(self) -> set[str]:
        """The kinds of problems that were measured."""
        return {cell.size.kind for cell in self.cells}

    def __call__(self, size: ProblemSize, slowdown: float | None = 1.0) -> Prediction:
        """Return the prediction for a size. Problems of its kind must have been measured.

        `slowdown` is the memory bandwidth of the measured GPU over that of the GPU in question. None withholds times.
        """
        beyond = extrapolation_factors(self.cells, size)
        stretch = 1 + sum(map(math.log2, beyond.values()))
        wall, device, memory = (stretch * self.error(name) for name in (*TIMES, "peak_gib"))
        speed = 1.0 if slowdown is None else slowdown
        device_ms = self.fits("device_ms", size, speed)
        communication_ms = self.fits.communication_ms(size, speed)
        # No row has the time of the collectives alone: all of the device time's error may be theirs.
        of_part = device * (device_ms or 0.0) / communication_ms if communication_ms else 0.0
        known = ((self.fits("time_ms", size, speed), wall), (device_ms, device), (communication_ms, of_part))
        time, device_time, communication = (
            None if slowdown is None else Estimate.of(value, error) for value, error in known
        )
        return Prediction(
            self.label,
            size,
            time,
            device_time,
            communication,
            self.fits("bytes_communicated", size),
            Estimate.of(self.fits("peak_gib", size), memory),
            self.ran_out,
            beyond,
            len(self.cells),
        )

    def error(self, name: str) -> float:
        """Return the relative error that 90% of the left-out cells did not exceed."""
        return float(np.quantile(self.errors[name], ERROR_BAR_SHARE)) if self.errors.get(name) else 1.0


def extrapolation_factors(cells: Sequence[MeasuredCell], size: ProblemSize) -> dict[str, float]:
    """Return the factor by which each field of the size lies outside the measured range. Fields within are left out."""
    factors = {}
    for name, value in vars(size).items():
        known = [getattr(cell.size, name) for cell in cells]
        if isinstance(value, int) and not min(known) <= value <= max(known):
            factors[name] = max(value / max(known), min(known) / value)
    return factors


def models(measured: MeasuredCells) -> dict[str, VariantModel]:
    """Return a model for each variant that was measured often enough."""
    by_label = {}
    for label in measured.labels:
        cells = tuple(cell for cell in measured.cells if cell.label == label and cell.status == "ok")
        if len({cell.size for cell in cells}) >= MIN_SIZES and any(cell.peak_gib is not None for cell in cells):
            fits = Fits(measured.cost_model, label, cells)
            needs = [
                (float(cell.size.inputs_gib) + peak, limit_gib)
                for cell, limit_gib in measured.ran_out
                if cell.label == label and (peak := fits("peak_gib", cell.size)) is not None
            ]
            errors = leave_out(measured.cost_model, cells, one_by_one(cells))
            by_label[label] = VariantModel(label, cells, fits, errors, needs)
    return by_label


def one_by_one(cells: Sequence[MeasuredCell]) -> list[set[Any]]:
    """Return each size of the cells as a group of its own."""
    return [{size} for size in dict.fromkeys(cell.size for cell in cells)]


def leave_out(
    cost_model: CostModel, cells: Sequence[MeasuredCell], groups: Sequence[Collection[Any]]
) -> dict[str, list[float]]:
    """Return the relative errors of each quantity. Each group of sizes is predicted from the cells of other sizes.

    A prediction that is unknown is not counted.
    """
    errors: dict[str, list[float]] = {name: [] for name in (*TIMES, *COUNTED)}
    for group in groups:
        others = [cell for cell in cells if cell.size not in group]
        if not any(cell.peak_gib is not None for cell in others):
            continue
        fits = Fits(cost_model, cells[0].label, others)
        for cell in (cell for cell in cells if cell.size in group):
            for name in (*TIMES, *COUNTED):
                truth, predicted = getattr(cell, name), fits(name, cell.size)
                if truth and predicted is not None:
                    errors[name].append(abs(predicted / truth - 1))
    return errors


def predicted_oom(models: Mapping[str, VariantModel], label: str, size: ProblemSize, free_gib: float) -> str | None:
    """Return why a cell is predicted to run out of memory, or None if it fits, may fit, or cannot be predicted.

    Args:
        models: the result of `tpbench.predict.model.models`.
        label: the variant with its options, as reports name it.
        size: the problem.
        free_gib: memory that each rank may use. A cell runs out only if the whole error bar lies above it, or if a
            measured cell of the variant with the same need ran out.
    """
    model = models.get(label)
    if model is None:
        return None
    predicted = model(size)
    if predicted.memory_outcome(free_gib) != "OOM":
        return None
    if reason := predicted.memory_reason(free_gib):
        return f"expected to run out of memory: {reason}"
    return (
        f"predicted to run out of memory: {predicted.needed_gib:.3g} GiB (error {predicted.peak_gib.error:.1%}), "
        f"{free_gib:.3g} GiB free"
    )
