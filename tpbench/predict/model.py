"""A variant's model: terms that are fitted to measured cells, with errors on cells that were left out.

The terms come from the workload's cost model (`tpbench.workloads.cost_model`). A time has alternative terms, and the
ones with the smallest error are taken. Memory and bytes sent are counts, and are fitted in the same way.

A wall time is the device time and what the host adds. The host's part depends on launches and ranks, not on bytes: a
fit of wall times with terms of bytes would mistake differences between hosts for bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

from tpbench.predict.cells import MeasuredCell, MeasuredCells, span
from tpbench.predict.memory import RESERVE_GIB, SAME_SHARE, Estimate
from tpbench.report.analysis.metrics import number
from tpbench.workloads.cost_model import CostModel, ProblemSize, Terms, TimeTerms

COLLINEAR_TOLERANCE = 1e-4
"""Columns of unit length that differ by less cannot be told apart."""


@dataclass(frozen=True)
class Fit:
    """A fitted sum of terms."""

    terms: Terms
    coefficients: dict[str, float]
    kinds: frozenset[str]
    """The kinds of problems that were measured."""
    separates_collectives: bool = False
    """True if the measured cells tell the contribution of the collectives apart from the rest."""

    def __call__(self, size: ProblemSize, slowdown: float = 1.0) -> float:
        """Return the sum. `slowdown` multiplies the terms that a GPU's memory bandwidth limits."""
        parts = self.parts(size)
        return sum(value * (slowdown if name.startswith("bytes") else 1.0) for name, value in parts.items())

    def parts(self, size: ProblemSize) -> dict[str, float]:
        """Return the contribution of each term."""
        return {name: self.coefficients.get(name, 0.0) * value for name, value in self.terms(size).items()}

    def communication(self, size: ProblemSize) -> float | None:
        """Return the contribution of the collectives: zero without any, None if the cells do not tell it."""
        parts = [value for name, value in self.parts(size).items() if _is_collective(name)]
        if not parts:
            return 0.0
        return sum(parts) or None if self.separates_collectives else None


def fit(
    terms: Terms, sizes: Sequence[ProblemSize], values: Sequence[float], known: Callable[[Any], float] | None = None
) -> Fit:
    """Fit by least squares of the relative error, with coefficients of at least zero.

    `known` returns the part of the value of a size that the terms need not explain.
    """
    rows = [terms(size) for size in sizes]
    names = list(dict.fromkeys(name for row in rows for name in row))
    matrix: np.ndarray[Any, Any] = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    measured = np.asarray(values, dtype=np.float64)
    weights = 1 / np.maximum(measured, 1e-9)
    targets = measured - ([known(size) for size in sizes] if known else 0.0)
    scaled = matrix * weights[:, None]
    norms = np.maximum(np.linalg.norm(scaled, axis=0), 1e-30)  # terms in ms and in bytes side by side
    solution, _ = optimize.nnls(scaled / norms, targets * weights, maxiter=100 * len(names))
    coefficients = dict(zip(names, (solution / norms).tolist(), strict=True))
    return Fit(terms, coefficients, frozenset(size.kind for size in sizes), _separable(scaled / norms, names))


def _is_collective(name: str) -> bool:
    return name.startswith("collective")


def _separable(matrix: np.ndarray[Any, Any], names: Sequence[str]) -> bool:
    """Return true if no sum of the collectives' columns equals a sum of the other columns."""
    collective = np.array([_is_collective(name) for name in names])
    ranks = [_rank(matrix[:, columns]) for columns in (collective, ~collective, collective | True)]
    return ranks[0] > 0 and ranks[0] + ranks[1] == ranks[2]


def _rank(matrix: np.ndarray[Any, Any]) -> int:
    return int(np.linalg.matrix_rank(matrix, tol=COLLINEAR_TOLERANCE)) if matrix.size else 0


def fit_cells(cost_model: CostModel, cells: Sequence[MeasuredCell]) -> dict[str, Fit]:
    """Fit a variant's `peak_gib`, and its `sent`, `time_ms` and `device_ms` if a cell has them."""
    fits: dict[str, Fit] = {"peak_gib": fit(cost_model.memory_terms, *_known(cells, "peak_gib"))}
    sending = [cell for cell in cells if cost_model.sent_terms(cell.size)]
    if any(cell.bytes_communicated is not None for cell in sending):
        fits["sent"] = fit(cost_model.sent_terms, *_known(sending, "bytes_communicated"))
    clocks = {clock: _known(cells, clock) for clock in ("device_ms", "time_ms")}
    for clock, (sizes, values) in clocks.items():
        if sizes and "device_ms" in fits:
            fits[clock] = _with_host(fits["device_ms"], sizes, values)
        elif sizes:
            sent = fits.get("sent", lambda size: 0.0)
            tried = [fit(_with_sent(terms, sent), sizes, values) for terms in cost_model.time_terms]
            fits[clock] = min(tried, key=lambda fitted: _error(fitted, sizes, values))
    return fits


def _with_host(device: Fit, sizes: Sequence[ProblemSize], values: Sequence[float]) -> Fit:
    """Return the fit of wall times: the device time, and the part of the host."""
    host = fit(_host_terms, sizes, values, known=device)

    def terms(size: ProblemSize) -> Mapping[str, float]:
        return {**device.terms(size), **_host_terms(size)}

    return replace(device, terms=terms, coefficients=device.coefficients | host.coefficients, kinds=host.kinds)


def _host_terms(size: ProblemSize) -> Mapping[str, float]:
    """Return the terms of the host's part: a constant, and for several ranks another one and one for each doubling."""
    several = {"host start": 1.0, "host latency": math.log2(size.tp_size)} if size.tp_size > 1 else {}
    return {"host launches": 1.0, **several}


def _with_sent(terms: TimeTerms, sent: Callable[[ProblemSize], float]) -> Terms:
    def complete(size: ProblemSize) -> Mapping[str, float]:
        return terms(size, sent(size))

    return complete


def _known(cells: Sequence[MeasuredCell], name: str) -> tuple[list[ProblemSize], list[float]]:
    known = [(cell.size, value) for cell in cells if (value := getattr(cell, name)) is not None]
    return [size for size, _ in known], [value for _, value in known]


def _error(fitted: Fit, sizes: Sequence[ProblemSize], values: Sequence[float]) -> float:
    return sum((fitted(size) / max(value, 1e-9) - 1) ** 2 for size, value in zip(sizes, values, strict=True))


MIN_SIZES = 4
"""A variant with fewer measured sizes is not predicted."""
ERROR_BAR_SHARE = 0.9
"""Share of the left-out cells that lie within an error bar."""
QUANTITIES = ("time_ms", "device_ms", "peak_gib")


OUTCOMES = ("fits", "tight", "OOM")


class RanOut(NamedTuple):
    """A measured cell that ran out of memory."""

    needed_gib: float
    """Predicted need, inputs included."""
    gpu_memory_gib: float
    """Memory of the GPU that the cell ran on, or the limit that its job set."""


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a variant on one problem."""

    label: str
    size: Any
    """The problem's `ProblemSize`."""
    time_ms: Estimate | None
    device_ms: Estimate | None
    communication_ms: float | None
    """None: withheld, or the rows cannot tell it apart from the rest."""
    bytes_communicated: float | None
    """None: no row over several ranks tells it."""
    peak_gib: Estimate
    largest_ok_gib: float = 0.0
    """Largest predicted need of a measured cell of the variant that ran, inputs included."""
    ran_out: tuple[RanOut, ...] = ()

    @property
    def needed_gib(self) -> float:
        """Predicted need, inputs included."""
        return float(self.size.inputs_gib) + self.peak_gib.value

    def memory_outcome(self, free_gib: float) -> str:
        """Return `fits`, `OOM`, or `tight` if the error bar includes both. Measured cells can make it worse.

        From the need of a cell that ran out it is `OOM`, and `tight` if a cell with a larger need ran, or if only
        cells with a smaller need ran.
        """
        return OUTCOMES[max(self._predicted_outcome(free_gib), self._measured_outcome(free_gib))]

    def memory_reason(self, free_gib: float) -> str | None:
        """Return the measured cells that make this outcome worse than the prediction alone, or None if none do."""
        failed, outcome = self._smallest_ran_out(free_gib), self._measured_outcome(free_gib)
        if failed is None or outcome <= self._predicted_outcome(free_gib):
            return None
        largest = f", the largest that ran needs {number(self.largest_ok_gib)} GiB" if outcome == 1 else ""
        return (
            f"with its inputs it needs {number(self.needed_gib)} GiB, and a measured cell that needs "
            f"{number(failed.needed_gib)} GiB ran out of memory within {number(failed.gpu_memory_gib)} GiB{largest}"
        )

    def _predicted_outcome(self, free_gib: float) -> int:
        bounds = (self.size.inputs_gib + bound for bound in (self.peak_gib.low, self.peak_gib.high))
        return sum(bound > free_gib for bound in bounds)

    def _measured_outcome(self, free_gib: float) -> int:
        failed = self._smallest_ran_out(free_gib)
        return 0 if failed is None else (self.needed_gib >= failed[0]) + (self.needed_gib > self.largest_ok_gib)

    def _smallest_ran_out(self, free_gib: float) -> RanOut | None:
        """Return the cell with the smallest need that ran out although its GPU had at least as much memory."""
        large = (cell for cell in self.ran_out if free_gib <= (cell.gpu_memory_gib - RESERVE_GIB) * (1 + SAME_SHARE))
        return min(large, default=None)


@dataclass(frozen=True)
class VariantModel:
    """One variant's fits, with their relative errors on cells that were left out."""

    label: str
    cells: tuple[MeasuredCell, ...]
    fits: dict[str, Fit]
    errors: dict[str, list[float]] = field(default_factory=dict)
    ran_out: tuple[MeasuredCell, ...] = ()
    """Cells that ran out of memory. Each has a `memory_limit_gib`."""

    def __call__(self, size: ProblemSize, slowdown: float | None = 1.0) -> Prediction:
        """Return the prediction for a size. Problems of its kind must have been measured.

        `slowdown` is the memory bandwidth of the measured GPU over that of the GPU in question. None withholds times.
        """
        stretch = 1 + sum(math.log2(times) for times in extrapolation_factors(self.cells, size).values())
        estimates = {
            name: Estimate(
                self.fits[name](size) if name == "peak_gib" else self.fits[name](size, slowdown or 1.0),
                stretch * self.error(name),
            )
            for name in QUANTITIES
            if name in self.fits and (name == "peak_gib" or slowdown is not None)
        }
        sent = self._sent(size)
        clock = self.fits.get("device_ms") or self.fits.get("time_ms")
        return Prediction(
            self.label,
            size,
            estimates.get("time_ms"),
            estimates.get("device_ms"),
            None if slowdown is None or clock is None or sent is None else clock.communication(size),
            sent,
            estimates["peak_gib"],
            *self._memory_bounds,
        )

    def _sent(self, size: ProblemSize) -> float | None:
        if size.tp_size == 1:
            return 0.0
        sent = self.fits.get("sent")
        return sent(size) if sent and size.kind in sent.kinds else None

    @functools.cached_property
    def _memory_bounds(self) -> tuple[float, tuple[RanOut, ...]]:
        """The last two fields of predictions, from measured cells of the kinds whose memory is known."""
        memory = self.fits["peak_gib"]
        needs = {cell: float(cell.size.inputs_gib) + memory(cell.size) for cell in (*self.cells, *self.ran_out)}
        known = {cell: need for cell, need in needs.items() if cell.size.kind in memory.kinds}
        failed = tuple(RanOut(known[cell], cell.memory_limit_gib or 0.0) for cell in self.ran_out if cell in known)
        return max(known[cell] for cell in self.cells if cell in known), failed

    def error(self, name: str) -> float:
        """Return the relative error that 90% of the left-out cells did not exceed."""
        return float(np.quantile(self.errors[name], ERROR_BAR_SHARE)) if self.errors.get(name) else 1.0


def extrapolation_factors(cells: Sequence[MeasuredCell], size: ProblemSize) -> dict[str, float]:
    """Return the factor by which each field of the size lies outside the measured range. Fields within are left out."""
    factors = {}
    for name, (low, high) in span(cells).items():
        value = getattr(size, name)
        if value > high or value < low:
            factors[name] = max(value / high, low / value)
    return factors


def models(measured: MeasuredCells, *, errors: bool = True) -> dict[str, VariantModel]:
    """Return a model for each variant that was measured often enough. `errors=False` leaves out the slow part."""
    by_label = {}
    for label in measured.labels:
        cells = tuple(cell for cell in measured.cells if cell.label == label and cell.status == "ok")
        if len({cell.size for cell in cells}) >= MIN_SIZES and any(cell.peak_gib is not None for cell in cells):
            left_out = leave_out(measured.cost_model, cells) if errors else {}
            ran_out = tuple(cell for cell in measured.ran_out if cell.label == label)
            by_label[label] = VariantModel(label, cells, fit_cells(measured.cost_model, cells), left_out, ran_out)
    return by_label


def leave_out(cost_model: CostModel, cells: Sequence[MeasuredCell]) -> dict[str, list[float]]:
    """Return the relative errors of all cells for each quantity. Each cell is predicted from the others.

    A cell is not counted if fewer than two other cells are of its kind.
    """
    errors: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    for left_out in cells:
        others = [cell for cell in cells if cell.size != left_out.size]
        if sum(cell.size.kind == left_out.size.kind for cell in others) < 2:
            continue
        fits = fit_cells(cost_model, others)
        for name in QUANTITIES:
            truth = getattr(left_out, name)
            if truth and name in fits:
                errors[name].append(abs(fits[name](left_out.size) / truth - 1))
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
    if model is None or size.kind not in model.fits["peak_gib"].kinds:
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
