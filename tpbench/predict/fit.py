"""Fits of counted terms to measured values. A value that the measured cells do not determine is unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy import optimize

from tpbench.workloads.cost_model import Terms

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
