"""How much slower one set of samples is than another, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

CONFIDENCE = 0.95
DRAWS = 10_000
FEWEST = 6
"""Samples below which there is no interval."""
METHOD = (
    f"{CONFIDENCE:.0%} bootstrap interval of the ratio of medians ({DRAWS} draws, percentiles, each side drawn anew); "
    f"from {FEWEST} samples a side on. It holds what varies within a run, not between runs"
)

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Ratio:
    """A ratio of two medians with its interval, where there are samples enough for one."""

    value: float
    low: float | None = None
    high: float | None = None


def ratio(above: Sequence[float] | None, below: Sequence[float] | None) -> Ratio | None:
    """median(above) / median(below) with its bootstrap interval, or None where a side has no positive median."""
    top, bottom = clean(above), clean(below)
    if not len(top) or not len(bottom) or np.median(bottom) <= 0 or np.median(top) <= 0:
        return None
    value = float(np.median(top) / np.median(bottom))
    if min(len(top), len(bottom)) < FEWEST:
        return Ratio(value)
    random = np.random.default_rng(0)  # the same rows make the same report
    with np.errstate(divide="ignore"):
        draws = _medians(top, random) / _medians(bottom, random)
    low, high = np.percentile(draws, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Ratio(value, float(min(low, value)), float(max(high, value)))


def clean(samples: Sequence[float] | None) -> Array:
    """The samples that are numbers."""
    values = np.asarray([] if samples is None else samples, dtype=np.float64)
    finite: Array = values[np.isfinite(values)]
    return finite


def _medians(samples: Array, random: np.random.Generator) -> Array:
    """Medians of bootstrap resamples, without resampling.

    A resample is samples[floor(n U)] for n uniform U, sorted with them, so its median is the sample at the median U,
    which is Beta((n + 1) / 2, (n + 1) / 2). For an odd n this is exact; for an even one the two middle samples, which
    a plain bootstrap averages, are stood for by one between them.
    """
    count = len(samples)
    middle = random.beta((count + 1) / 2, (count + 1) / 2, DRAWS)
    medians: Array = np.sort(samples)[np.minimum((middle * count).astype(int), count - 1)]
    return medians
