"""A variant's model, with its errors on cells that were left out of the fit."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpbench.predict.cells import MeasuredCell, MeasuredCells, span
from tpbench.predict.estimate import Estimate
from tpbench.predict.fit import Fit, fit_cells
from tpbench.predict.memory import MeasuredMemory, RanOut, memory_outcome, memory_reason
from tpbench.workloads.cost_model import CostModel, ProblemSize

MIN_SIZES = 4
"""A variant with fewer measured sizes is not predicted."""
ERROR_BAR_SHARE = 0.9
"""Share of the left-out cells that lie within an error bar."""
QUANTITIES = ("time_ms", "device_ms", "peak_gib")


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
    memory_bounds: MeasuredMemory = MeasuredMemory()

    @property
    def needed_gib(self) -> float:
        """Predicted need, inputs included."""
        return float(self.size.inputs_gib) + self.peak_gib.value

    def memory_outcome(self, free_gib: float) -> str:
        """Return `fits`, `tight` or `OOM`, for the memory that the operation may use."""
        return memory_outcome(self.size, self.peak_gib, free_gib, self.memory_bounds)

    def memory_reason(self, free_gib: float) -> str | None:
        """Return the measured cells that make this outcome worse than the prediction alone, or None if none do."""
        return memory_reason(self.size, self.peak_gib, free_gib, self.memory_bounds)


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
            self.memory_bounds,
        )

    def _sent(self, size: ProblemSize) -> float | None:
        if size.tp_size == 1:
            return 0.0
        sent = self.fits.get("sent")
        return sent(size) if sent and size.kind in sent.kinds else None

    @functools.cached_property
    def memory_bounds(self) -> MeasuredMemory:
        """Bounds on the memory that fits, from the measured cells."""
        memory = self.fits["peak_gib"]

        def needed(cell: MeasuredCell) -> float:
            return float(cell.size.inputs_gib) + memory(cell.size)

        failed = [cell for cell in self.ran_out if cell.size.kind in memory.kinds]
        return MeasuredMemory(
            max(needed(cell) for cell in self.cells if cell.size.kind in memory.kinds),
            tuple(RanOut(needed(cell), cell.memory_limit_gib or 0.0) for cell in failed),
        )

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
