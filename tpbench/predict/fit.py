"""The model of a cell's cost: a sum of terms that each have a meaning, fitted with no negative coefficient.

time = launches(loss) + bytes worked on / effective bandwidth(loss)
     + latency of the collectives, which grows with the logarithm of the world size
     + bytes sent / bandwidth of the collectives

The bytes worked on are a rank's shard, or all of the logits for a variant that gathers them: which of the two is found
by trying both. Memory and bytes sent are counts, and their terms are fitted the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy import optimize

from tpbench.predict.cells import Cell, Size

Terms: TypeAlias = Callable[[Size], dict[str, float]]


@dataclass(frozen=True)
class Fit:
    """A fitted sum of terms."""

    terms: Terms
    coefficients: dict[str, float]
    losses: frozenset[str]

    def __call__(self, size: Size) -> float:
        return sum(self.parts(size).values())

    def parts(self, size: Size) -> dict[str, float]:
        """What each term adds."""
        return {name: self.coefficients.get(name, 0.0) * value for name, value in self.terms(size).items()}

    def communication(self, size: Size) -> float:
        """What the terms of the collectives add."""
        return sum(value for name, value in self.parts(size).items() if name.startswith("collective"))


def fit(terms: Terms, sizes: Sequence[Size], values: Sequence[float]) -> Fit:
    """Least squares on the relative error, coefficients at least zero."""
    rows = [terms(size) for size in sizes]
    names = list(dict.fromkeys(name for row in rows for name in row))
    matrix: np.ndarray[Any, Any] = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    targets = np.asarray(values, dtype=np.float64)
    weights = 1 / np.maximum(targets, 1e-9)
    scaled = matrix * weights[:, None]
    norms = np.maximum(np.linalg.norm(scaled, axis=0), 1e-30)  # terms in ms and in bytes side by side
    solution, _ = optimize.nnls(scaled / norms, targets * weights, maxiter=100 * len(names))
    found = dict(zip(names, (solution / norms).tolist(), strict=True))
    return Fit(terms, found, frozenset(size.loss for size in sizes))


def fit_time(cells: Sequence[Cell], clock: str, sent: Callable[[Size], float]) -> Fit:
    """The model of a variant's wall (`time_ms`) or device (`device_ms`) time."""
    sizes, values = _known(cells, clock)
    fits = [fit(_time_terms(gathers, sent), sizes, values) for gathers in (False, True)]
    return min(fits, key=lambda each: _error(each, sizes, values))


def _time_terms(gathers: bool, sent: Callable[[Size], float]) -> Terms:
    def terms(size: Size) -> dict[str, float]:
        work = size.full if gathers else size.shard
        found = {f"launches {size.loss}": 1.0, f"bytes {size.loss}": float(work * size.item)}
        if size.tp_size > 1:
            found |= {
                "collective start": 1.0,
                "collective latency": math.log2(size.tp_size),
                "collective bytes": sent(size),
            }
        return found

    return terms


def fit_memory(cells: Sequence[Cell]) -> Fit:
    """The model of a variant's extra peak memory, in GiB."""
    return fit(_memory_terms, *_known(cells, "peak_gib"))


def _memory_terms(size: Size) -> dict[str, float]:
    found = {
        "constant": 1.0,
        "a row": float(size.tokens),
        f"shard {size.loss}": float(size.shard * size.item),
        f"full {size.loss}": float(size.full * size.item),
    }
    if size.tp_size > 1:  # what is gathered where there is something to gather
        found[f"gathered {size.loss}"] = float(size.full * size.item)
    return found


def fit_sent(cells: Sequence[Cell]) -> Fit:
    """The count of bytes that the busiest rank sends."""
    sharded = [cell for cell in cells if cell.size.tp_size > 1]
    return fit(_sent_terms, *_known(sharded, "bytes_communicated"))


def _sent_terms(size: Size) -> dict[str, float]:
    if size.tp_size == 1:
        return {}
    return {
        f"once {size.loss}": float(size.tokens),
        f"each peer {size.loss}": float(size.tokens * (size.tp_size - 1)),
        f"shards {size.loss}": float(size.shard * (size.tp_size - 1) * size.item),
    }


def _known(cells: Sequence[Cell], name: str) -> tuple[list[Size], list[float]]:
    found = [(cell.size, value) for cell in cells if (value := getattr(cell, name)) is not None]
    return [size for size, _ in found], [value for _, value in found]


def _error(made: Fit, sizes: Sequence[Size], values: Sequence[float]) -> float:
    return sum((made(size) / max(value, 1e-9) - 1) ** 2 for size, value in zip(sizes, values, strict=True))
