"""Shares and bottlenecks of synthetic traces."""

from __future__ import annotations

import pytest

from tpbench.measure.bottleneck import Shares, between_markers, busy_ms
from tpbench.measure.timeline import Event, intervals

MARKER = "at::cuda::(anonymous namespace)::spin_kernel(long)"
GEMM, ALL_REDUCE, PEER_COPY = "nvjet_tst_128x256", "ncclDevKernel_AllReduce_Sum", "Memcpy PtoP (Device -> Device)"
MS = 10**6


def kernel(name: str, start_ms: float, length_ms: float, stream: int = 7) -> Event:
    return name, int(start_ms * MS), int(length_ms * MS), stream


def busy(*events: Event) -> tuple[float, float]:
    return busy_ms(intervals(events, on_gpu=True))


def test_work_of_two_streams_counts_once_and_hidden_communication_not_at_all() -> None:
    kernels = kernel(GEMM, 0, 4), kernel("silu_kernel", 3, 2, stream=8)  # 5 ms
    assert busy(*kernels) == pytest.approx((5.0, 0.0))
    hidden, half_hidden = kernel(ALL_REDUCE, 1, 2, stream=9), kernel(PEER_COPY, 4, 3, stream=10)
    assert busy(*kernels, hidden) == pytest.approx((5.0, 0.0))
    assert busy(*kernels, hidden, half_hidden) == pytest.approx((5.0, 2.0))
    assert busy(*kernels, kernel(ALL_REDUCE, 8, 1), half_hidden) == pytest.approx((5.0, 3.0))


def test_an_empty_trace_is_idle() -> None:
    assert busy() == (0.0, 0.0)


def test_iterations_lie_between_pairs_of_markers() -> None:
    first, second = [kernel(GEMM, 3, 1), kernel(ALL_REDUCE, 4, 1)], [kernel(GEMM, 13, 1)]
    flushes = [kernel("fill_kernel", 0, 1), kernel(ALL_REDUCE, 1, 0.5), kernel("fill_kernel", 10, 1)]
    markers = [kernel(MARKER, at, 0.001) for at in (2, 6, 12, 15)]
    assert list(between_markers([*flushes, *second, *markers, *first])) == [first, second]
    assert list(between_markers([*first, markers[0]])) == []  # a trace that was cut off has no whole iteration


def test_idle_time_is_the_rest_of_the_wall_time() -> None:
    shares = Shares.of(compute_ms=2.0, communication_ms=1.0, time_ms=4.0)
    assert shares == Shares(0.5, 0.25, 0.25)
    longer = Shares.of(compute_ms=3.0, communication_ms=2.0, time_ms=4.0)  # the traced iterations were slower
    assert longer == Shares(0.6, 0.4, pytest.approx(0.0))


@pytest.mark.parametrize(
    ("shares", "bound"),
    [
        (Shares(0.79, 0.0, 0.21), "host"),
        (Shares(0.1, 0.69, 0.21), "host"),
        (Shares(0.4, 0.41, 0.19), "wire"),
        (Shares(0.41, 0.4, 0.19), "memory"),
    ],
)
def test_the_host_comes_first_then_the_wire(shares: Shares, bound: str) -> None:
    assert shares.bound(compute_ms=1.0, memory_ms=2.0) == bound


def test_the_longer_roofline_time_decides_between_compute_and_memory() -> None:
    busy_shares = Shares(0.9, 0.1, 0.0)
    assert busy_shares.bound(compute_ms=2.0, memory_ms=1.0) == "compute"
    assert busy_shares.bound(compute_ms=0.0, memory_ms=1.0) == "memory"
