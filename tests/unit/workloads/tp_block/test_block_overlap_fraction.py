"""The overlap of products and communication in a traced step."""

from __future__ import annotations

import pytest

from tpbench.measure.gpu_profiler import COMMUNICATION, OTHER, PRODUCT, Interval
from tpbench.workloads.tp_block.execution import measurements


def test_times_that_overlap_are_counted_once() -> None:
    def made(kind: int, *spans: tuple[float, float]) -> list[Interval]:
        return [Interval(start, end - start, kind, 0) for start, end in spans]

    communication = made(COMMUNICATION, (0, 4), (2, 6), (10, 12))  # 8 ms: 0 to 6 and 10 to 12
    products = made(PRODUCT, (1, 3), (2, 4), (5, 11))  # of which 1 to 4, 5 to 6 and 10 to 11
    assert measurements.overlap_fraction([*communication, *products, *made(OTHER, (0, 100))]) == pytest.approx(5 / 8)
    assert measurements.overlap_fraction(products) is None
    assert measurements.overlap_fraction(communication) == 0.0
