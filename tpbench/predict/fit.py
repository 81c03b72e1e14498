"""Fit a sum of terms to measured cells, with no negative coefficient.

The terms come from the workload's cost model (`tpbench.workloads.cost_model`). A time has alternative terms, and the
ones with the smallest error are taken. Memory and bytes sent are counts, and are fitted in the same way.

A wall time is the device time and what the host adds. The host's part depends on launches and ranks, not on bytes: a
fit of wall times with terms of bytes would mistake differences between hosts for bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import optimize

from tpbench.predict.cells import MeasuredCell
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
            fits[clock] = min(tried, key=lambda each: _error(each, sizes, values))
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
