"""Ratio of the medians of two sets of samples, with a bootstrap interval."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

CONFIDENCE = 0.95
DRAWS = 10_000
FEWEST = 6
"""Fewest samples of a side for which an interval is computed."""
METHOD = (
    f"{CONFIDENCE:.0%} bootstrap interval of the ratio of medians ({DRAWS} draws, percentiles, each side drawn anew); "
    f"from {FEWEST} samples a side on. It holds what varies within a run, not between runs"
)

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int_]]


@dataclass(frozen=True)
class Ratio:
    """Ratio of two medians. The interval is missing if there are too few samples."""

    value: float
    low: float | None = None
    high: float | None = None


def ratio(above: Sequence[float] | None, below: Sequence[float] | None) -> Ratio | None:
    """Return median(above) / median(below) with its bootstrap interval, or None if a side has no positive median."""
    top, bottom = clean(above), clean(below)
    if not len(top) or not len(bottom) or np.median(bottom) <= 0 or np.median(top) <= 0:
        return None
    value = float(np.median(top) / np.median(bottom))
    if min(len(top), len(bottom)) < FEWEST:
        return Ratio(value)
    at_top, at_bottom = _resampled_medians(len(top), len(bottom))
    with np.errstate(divide="ignore"):
        draws = np.sort(top)[at_top] / np.sort(bottom)[at_bottom]
    low, high = np.percentile(draws, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Ratio(value, float(min(low, value)), float(max(high, value)))


def clean(samples: Sequence[float] | None) -> Array:
    """Return the finite samples as an array."""
    values = np.asarray([] if samples is None else samples, dtype=np.float64)
    finite: Array = values[np.isfinite(values)]
    return finite


@functools.lru_cache(maxsize=64)  # most cells have one of a few numbers of samples, and the draws are slow
def _resampled_medians(*counts: int) -> tuple[Indices, ...]:
    """Return, for sides of `counts` sorted samples, the index of the median in each bootstrap resample.

    A resample is samples[floor(n U)] for n uniform U, sorted with them. Its median is the sample at the median U, which
    is Beta((n + 1) / 2, (n + 1) / 2). This is exact for an odd n. For an even n, a plain bootstrap averages the two
    middle samples; here one sample between them replaces the average.
    """
    random = np.random.default_rng(0)  # the same rows make the same report
    middles = [(count, random.beta((count + 1) / 2, (count + 1) / 2, DRAWS)) for count in counts]
    return tuple(np.minimum((middle * count).astype(int), count - 1) for count, middle in middles)
