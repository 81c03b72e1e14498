"""Medians and their intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpbench.measure.clocks import DEVICE, WALL
from tpbench.measure.statistics import median_interval, precise_enough, summary

SAMPLES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=200)


@given(SAMPLES)
def test_the_interval_holds_the_median_and_lies_within_the_samples(samples: list[float]) -> None:
    interval = median_interval(samples)
    assert (interval is None) == (len(samples) < 6)
    if interval:
        assert min(samples) <= interval[0] <= np.median(samples) <= interval[1] <= max(samples)


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (10, 2), (20, 6), (100, 40)])
def test_the_interval_is_the_textbook_one(count: int, rank: int) -> None:
    # Ranks of the order statistics as tabled for 95% (Conover 1999, table A3 gives the binomial quantiles).
    assert median_interval(list(range(1, count + 1))) == (rank, count + 1 - rank)


def test_precision_is_a_share_of_the_median() -> None:
    samples = [100.0, 101.0] * 50
    assert precise_enough(samples, 0.02)
    assert not precise_enough(samples, 0.001)
    assert not precise_enough([1.0] * 5, 0.5)  # too few to know


def test_a_summary_names_each_statistic() -> None:
    found = summary([float(each) for each in range(101)], DEVICE)
    assert found == {
        "device_ms": 50.0, "device_p5_ms": 5.0, "device_p95_ms": 95.0, "device_min_ms": 0.0, "device_ci_low_ms": 40.0,
        "device_ci_high_ms": 60.0,
    }  # fmt: skip
    assert summary([1.0, 2.0], WALL)["time_ci_low_ms"] is None
