"""The stop rule of a measurement in one go."""

from __future__ import annotations

import numpy as np
import pytest

from tpbench.measure.run import _next_block
from tpbench.measure.settings import MeasureSettings

VARYING = [np.array([1.0, 2.0]), np.array([1.0, 3.0])]
EQUAL = [np.array([1.0, 2.0])] * 2


def limits(**fields: float) -> MeasureSettings:
    return MeasureSettings(
        **{"time_budget_s": 1.0, "min_iterations": 20, "max_iterations": 30, "precision": 0.0, **fields}
    )


def test_the_next_block_never_passes_the_limits() -> None:
    settings = limits()
    samples = VARYING * 14
    assert _next_block(samples, 0.1, settings) == 2
    assert _next_block(samples + samples, 0.1, settings) == 0
    assert _next_block(samples, 1.5, settings) == 0
    assert _next_block(samples, 1.0, settings) == 0
    assert _next_block(VARYING * 15, 0.1, settings) == 0


@pytest.mark.parametrize(
    ("samples", "spent_s", "settings", "block"),
    [
        ([], 0.0, limits(), 5),
        ([], 0.0, limits(max_iterations=3), 3),
        (VARYING * 5, 0.2, limits(max_iterations=1000), 10),  # as many again
        (VARYING * 5, 0.2, limits(max_iterations=1000, min_iterations=25), 15),  # as many as are missing
        (VARYING * 5, 0.2, limits(max_iterations=1000, min_iterations=500), 40),  # as many as the time is enough for
        (VARYING * 5, 0.9, limits(max_iterations=1000, min_iterations=500), 1),
        (VARYING * 5, 0.99, limits(max_iterations=1000), 1),  # at least one
        (EQUAL * 5, 0.2, limits(min_iterations=10), 0),  # precise, and enough of them
        (EQUAL * 5, 0.2, limits(min_iterations=11), 10),
        (VARYING * 5, 0.2, limits(min_iterations=10), 10),  # enough, but not precise
        (VARYING * 5, 0.2, limits(min_iterations=10, precision=0.5), 0),
    ],
)
def test_a_block(samples: list[np.ndarray], spent_s: float, settings: MeasureSettings, block: int) -> None:
    assert _next_block(samples, spent_s, settings) == block
