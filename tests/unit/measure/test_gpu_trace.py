"""Shares and bottlenecks of synthetic traces, and the work that counts as communication."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity

from tpbench.measure import gpu_trace
from tpbench.measure.gpu_trace import Event, between_markers, busy_ms, share_columns
from tpbench.measure.session import Costs, IterationSchedule

MARKER = "at::cuda::(anonymous namespace)::spin_kernel(long)"
GEMM, ALL_REDUCE, PEER_COPY = "nvjet_tst_128x256", "ncclDevKernel_AllReduce_Sum", "Memcpy PtoP (Device -> Device)"
MS = 10**6


def kernel(name: str, start_ms: float, length_ms: float, stream: int = 7) -> Event:
    return Event(name, int(start_ms * MS), int(length_ms * MS), stream)


def busy(*events: Event) -> tuple[float, float]:
    return busy_ms(events)


def test_work_of_two_streams_counts_once_and_hidden_communication_not_at_all() -> None:
    kernels = kernel(GEMM, 0, 4), kernel("silu_kernel", 3, 2, stream=8)  # 5 ms
    assert busy(*kernels) == pytest.approx((5.0, 0.0))
    hidden, half_hidden = kernel(ALL_REDUCE, 1, 2, stream=9), kernel(PEER_COPY, 4, 3)
    assert busy(*kernels, hidden) == pytest.approx((5.0, 0.0))
    assert busy(*kernels, hidden, half_hidden) == pytest.approx((5.0, 2.0))
    assert busy(*kernels, kernel(ALL_REDUCE, 8, 1), half_hidden) == pytest.approx((5.0, 3.0))


def test_iterations_lie_between_pairs_of_markers() -> None:
    first, second = [kernel(GEMM, 3, 1), kernel(ALL_REDUCE, 4, 1)], [kernel(GEMM, 13, 1)]
    flushes = [kernel("fill_kernel", 0, 1), kernel(ALL_REDUCE, 1, 0.5), kernel("fill_kernel", 10, 1)]
    markers = [kernel(MARKER, at, 0.001) for at in (2, 6, 12, 15)]
    assert list(between_markers([*flushes, *second, *markers, *first])) == [first, second]
    assert list(between_markers([*first, markers[0]])) == []  # a trace that was cut off has no whole iteration


TIMES = {"time_ms": 4.0, "bytes_moved": 10**9, "copy_gb_per_s": 1000.0}  # memory traffic takes 1 ms


@pytest.mark.parametrize(
    ("busy_ms", "communication_ms", "compute_ms", "shares", "bound"),
    [
        (2.84, 0.4, 2.0, (0.71, 0.1, 0.19), "compute"),
        (2.84, 0.4, 0.5, (0.71, 0.1, 0.19), "memory"),
        (0.4, 2.76, 2.0, (0.1, 0.69, 0.21), "host"),
        (1.6, 1.64, 2.0, (0.4, 0.41, 0.19), "wire"),
        (3.0, 2.0, 2.0, (0.6, 0.4, 0.0), "compute"),  # the traced iterations were slower
    ],
)
def test_the_host_comes_first_then_the_wire_then_the_longer_roofline_time(
    busy_ms: float, communication_ms: float, compute_ms: float, shares: tuple[float, ...], bound: str
) -> None:
    *found, found_bound = share_columns(busy_ms, communication_ms, TIMES, compute_ms).values()
    assert (found, found_bound) == (pytest.approx(shares), bound)


def columns_of(
    monkeypatch: pytest.MonkeyPatch,
    traced: list[list[Event]] | None,
    *,
    on_peer: tuple[float, float] | None = None,
    stays: bool = False,
    device_ms: float = 3.9,
    sent: int = 8,
    in_kernels: bool = False,
    graph: bool = False,
    **session: Any,
) -> dict[str, Any]:
    """The columns on a rank with this trace. `on_peer`: the busy times of another rank, else equal to this one's."""
    costs = Costs(bytes_moved=10**9, bytes_communicated=sent, communicates_in_kernels=in_kernels, compute_ms=2.0)
    if traced is not None:
        monkeypatch.setattr(gpu_trace, "_traced", lambda *_: traced)
    monkeypatch.setattr(
        gpu_trace,
        "gather_numbers",
        lambda values, _: [np.array(pair) for pair in zip(values, on_peer or values, strict=True)],
    )
    here: Any = SimpleNamespace(process_stays=stays, device=torch.device("cuda"), graph=graph, say=lambda _: None)
    made: Any = SimpleNamespace(**{"costs": costs, "restore": None, "schedule": None} | session)
    nothing: Any = None
    times = TIMES | {"device_ms": device_ms}
    return gpu_trace.bottleneck_columns(nothing, made, nothing, here, times)


def test_the_columns_are_the_median_of_the_rank_that_waits_least(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = [[kernel(GEMM, 0, length), kernel(ALL_REDUCE, 3, 0.5)] for length in (3.0, 9.0, 3.0)]
    expected = {"compute_share": 0.75, "communication_share": 0.125, "idle_share": 0.125, "bound": "compute"}
    assert columns_of(monkeypatch, traced) == pytest.approx(expected)
    assert columns_of(monkeypatch, traced, on_peer=(1.0, 2.5)) == pytest.approx(expected)
    waiting = columns_of(monkeypatch, traced, on_peer=(2.0, 0.25))
    assert (waiting["compute_share"], waiting["bound"]) == (0.5, "host")


def test_without_a_trace_the_clocks_tell_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert columns_of(monkeypatch, []) == pytest.approx({"idle_share": 0.025})
    everything = {"compute_share": 0.975, "communication_share": 0.0, "idle_share": 0.025, "bound": "compute"}
    assert columns_of(monkeypatch, [], sent=0) == pytest.approx(everything)
    assert columns_of(monkeypatch, [], in_kernels=True) == pytest.approx(everything)
    assert columns_of(monkeypatch, [], device_ms=1.0) == pytest.approx({"idle_share": 0.75, "bound": "host"})
    schedule = IterationSchedule(warmup_iterations=1, iterations=1, held_before=0)
    assert columns_of(monkeypatch, [], schedule=schedule) == {}


def test_a_trace_with_little_of_a_replayed_step_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a graph, such a step is bound by the host."""
    schedule, little = IterationSchedule(warmup_iterations=1, iterations=1, held_before=0), [[kernel(GEMM, 0, 1.5)]]
    assert columns_of(monkeypatch, little, schedule=schedule, graph=True) == {}
    assert columns_of(monkeypatch, little, schedule=schedule)["bound"] == "host"


def test_a_process_that_runs_further_jobs_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = IterationSchedule(warmup_iterations=1, iterations=1, held_before=0)
    for session in ({}, {"schedule": schedule}):
        assert "compute_share" in columns_of(monkeypatch, [[kernel(GEMM, 0, 3.5)]], **session)
        assert "compute_share" not in columns_of(monkeypatch, [[kernel(GEMM, 0, 3.5)]], stays=True, **session)


@pytest.mark.parametrize("recordable", [False, True])
def test_a_gpu_is_traced_and_without_cupti_the_iterations_run_all_the_same(
    recordable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a GPU, torch's profiler starts and stops as on one, and records nothing."""
    ran: list[int] = []
    said: list[str] = []
    on_gpu = torch.cuda.is_available()
    activities = {ProfilerActivity.CUDA} if recordable else set()
    monkeypatch.setattr(gpu_trace, "has_run", False)  # restored after the test
    monkeypatch.setattr("torch.autograd.profiler._supported_activities", lambda: activities)
    if not on_gpu:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    wall: Any = SimpleNamespace(samples=lambda step, restore, iterations: [step() for _ in range(iterations)])
    here: Any = SimpleNamespace(device=torch.device("cuda"), say=said.append)
    traced = gpu_trace._traced(lambda: ran.append(1), lambda: None, wall, 3, here)
    assert len(ran) == 3 and len(traced) == (3 if on_gpu and recordable else 0)
    assert (said == []) if recordable else "requires use_cpu=True" in said[0]


def test_labels_are_no_work() -> None:
    recorded = [kernel("gemm", 5, 2, 77), kernel("ncclKernel", 4, 0.5, 13)]
    labels = [kernel("nccl:span", 0, 9, 13), kernel(MARKER, 1, 1, 13)]
    assert busy(*recorded, *labels) == pytest.approx((2.0, 0.5))


def test_a_stream_of_copies_alone_is_communication() -> None:
    copy = "Memcpy DtoD (Device -> Device)"
    recorded = [kernel("gemm", 0, 4, 7), kernel(copy, 4, 2, 7), kernel(copy, 1, 2, 20), kernel(copy, 5, 4, 20)]
    assert busy(*recorded) == pytest.approx((6.0, 3.0))
