"""A variant's model with what it is worth: its errors on cells that it was not shown, and how far it reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tpbench.predict.cells import Cell, Measured, Size, span
from tpbench.predict.fit import Fit, fit_memory, fit_sent, fit_time

FEWEST = 4
"""Cells of a variant below which nothing is predicted."""
SHARE = 0.9
"""Of the left-out cells, how many lie within an error bar."""
QUANTITIES = ("time_ms", "device_ms", "peak_gib")


@dataclass(frozen=True)
class Estimate:
    """A number with its error bar."""

    value: float
    error: float
    """As a share of the value."""

    @property
    def low(self) -> float:
        return self.value / (1 + self.error)

    @property
    def high(self) -> float:
        return self.value * (1 + self.error)


@dataclass(frozen=True)
class Prediction:
    """What a variant would take."""

    head: str
    time_ms: Estimate | None
    device_ms: Estimate | None
    communication_ms: float
    bytes_communicated: float
    peak_gib: Estimate


@dataclass(frozen=True)
class VariantModel:
    """One variant's fits, and the relative errors that they made on cells left out."""

    head: str
    cells: tuple[Cell, ...]
    fits: dict[str, Fit]
    errors: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, size: Size) -> Prediction:
        """The prediction for a size. Its loss must be among those measured."""
        stretch = 1 + sum(math.log2(times) for times in beyond(self.cells, size).values())
        estimates = {
            name: Estimate(self.fits[name](size), stretch * self.error(name))
            for name in QUANTITIES
            if name in self.fits
        }
        wall, device = estimates.get("time_ms"), estimates.get("device_ms")
        if wall and device and wall.value < device.value:  # fitted apart, and no iteration ends before its device does
            estimates["time_ms"] = replace(wall, value=device.value)
        clock = self.fits.get("device_ms") or self.fits.get("time_ms")
        return Prediction(
            self.head,
            estimates.get("time_ms"),
            estimates.get("device_ms"),
            clock.communication(size) if clock else 0.0,
            self.fits["sent"](size) if size.tp_size > 1 and "sent" in self.fits else 0.0,
            estimates["peak_gib"],
        )

    def error(self, name: str) -> float:
        """The share by which all but a tenth of the left-out cells were missed at most."""
        return float(np.quantile(self.errors[name], SHARE)) if self.errors.get(name) else 1.0


def beyond(cells: Sequence[Cell], size: Size) -> dict[str, float]:
    """By which factor each size lies outside what was measured; sizes within are left out."""
    found = {}
    for name, (low, high) in span(cells).items():
        value = getattr(size, name)
        if value > high or value < low:
            found[name] = max(value / high, low / value)
    return found


def models(measured: Measured, *, errors: bool = True) -> dict[str, VariantModel]:
    """A model for each variant that was measured often enough. `errors=False` leaves the slow part out."""
    made = {}
    for head in measured.heads:
        cells = tuple(cell for cell in measured.cells if cell.head == head and cell.status == "ok")
        if len({cell.size for cell in cells}) >= FEWEST and any(cell.peak_gib is not None for cell in cells):
            made[head] = VariantModel(head, cells, _fits(cells), leave_out(cells) if errors else {})
    return made


def _fits(cells: Sequence[Cell]) -> dict[str, Fit]:
    fits: dict[str, Fit] = {"peak_gib": fit_memory(cells)}
    if any(cell.size.tp_size > 1 and cell.bytes_communicated is not None for cell in cells):
        fits["sent"] = fit_sent(cells)
    for clock in ("time_ms", "device_ms"):
        if any(getattr(cell, clock) is not None for cell in cells):
            fits[clock] = fit_time(cells, clock, fits.get("sent", lambda size: 0.0))
    return fits


def leave_out(cells: Sequence[Cell]) -> dict[str, list[float]]:
    """For each quantity the relative errors of all cells, each predicted by a model that has not seen it.

    A cell whose loss is in no other cell cannot be predicted and is not counted.
    """
    errors: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    for left_out in cells:
        others = [cell for cell in cells if cell.size != left_out.size]
        if sum(cell.size.loss == left_out.size.loss for cell in others) < 2:
            continue
        fits = _fits(others)
        for name in QUANTITIES:
            truth = getattr(left_out, name)
            if truth and name in fits:
                errors[name].append(abs(fits[name](left_out.size) / truth - 1))
    return errors
