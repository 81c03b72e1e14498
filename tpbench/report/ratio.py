"""How much slower one set of samples is than another, and how sure that is."""

from __future__ import annotations

import functools
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
Places: TypeAlias = np.ndarray[Any, np.dtype[np.int_]]


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
    at_top, at_bottom = _medians(len(top), len(bottom))
    with np.errstate(divide="ignore"):
        draws = np.sort(top)[at_top] / np.sort(bottom)[at_bottom]
    low, high = np.percentile(draws, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Ratio(value, float(min(low, value)), float(max(high, value)))


def clean(samples: Sequence[float] | None) -> Array:
    """The samples that are numbers."""
    values = np.asarray([] if samples is None else samples, dtype=np.float64)
    finite: Array = values[np.isfinite(values)]
    return finite


@functools.lru_cache(maxsize=64)  # most cells of a report have one of a few numbers of samples, and draws take long
def _medians(*counts: int) -> tuple[Places, ...]:
    """For sides of so many samples, where among these in order the medians of bootstrap resamples are.

    A resample is samples[floor(n U)] for n uniform U, sorted with them, so its median is the sample at the median U,
    which is Beta((n + 1) / 2, (n + 1) / 2). For an odd n this is exact; for an even one the two middle samples, which
    a plain bootstrap averages, are stood for by one between them.
    """
    random = np.random.default_rng(0)  # the same rows make the same report
    middles = [(count, random.beta((count + 1) / 2, (count + 1) / 2, DRAWS)) for count in counts]
    return tuple(np.minimum((middle * count).astype(int), count - 1) for count, middle in middles)
