"""The stop rule of a measurement in one go."""

from __future__ import annotations

import numpy as np

from tpbench.measure.run import _next_block
from tpbench.measure.settings import MeasureSettings


def test_the_next_block_never_passes_the_limits() -> None:
    settings = MeasureSettings(time_budget_s=1.0, min_iterations=20, max_iterations=30, precision=0.0)
    samples = [np.array([1.0, 2.0]), np.array([1.0, 3.0])] * 14
    assert _next_block(samples, 0.1, settings) == 2
    assert _next_block(samples + samples, 0.1, settings) == 0
    assert _next_block(samples, 1.5, settings) == 0
