"""Intervals of a profiled step and their kinds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch._C._autograd import DeviceType

from tpbench.measure.gpu_profiler import (
    COMMUNICATION,
    OTHER,
    PRODUCT,
    Interval,
    covered_ms,
    events,
    intervals,
    kind_of,
    spans,
    union,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN", PRODUCT),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", PRODUCT),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>", PRODUCT),
        ("triton_tem_fused_mm_t_3", PRODUCT),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, gemm>>", OTHER),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("Memcpy PtoP (Device -> Device)", COMMUNICATION),
        ("Memcpy DtoD (Device -> Device)", OTHER),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>", OTHER),
        ("nccl:_all_gather_base", None),
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", None),
    ],
)
def test_kinds_of_what_runs_on_a_gpu(name: str, kind: int | None) -> None:
    assert kind_of(name, on_gpu=True) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [("aten::mm", PRODUCT), ("gloo:all_gather", COMMUNICATION), ("aten::mul", OTHER), ("aten::t", None)],
)
def test_kinds_of_what_runs_on_a_cpu(name: str, kind: int | None) -> None:
    assert kind_of(name, on_gpu=False) == kind


def test_intervals_begin_at_the_first_and_number_their_lanes() -> None:
    recorded = [("gemm", 5_000_000, 2_000_000, 77), ("ncclKernel", 4_000_000, 500_000, 13), ("nccl:span", 0, 9, 13)]
    assert intervals(recorded, on_gpu=True) == [Interval(0.0, 0.5, COMMUNICATION, 0), Interval(1.0, 2.0, PRODUCT, 1)]


def test_a_stream_of_copies_alone_is_communication() -> None:
    copy = "Memcpy DtoD (Device -> Device)"
    recorded = [("gemm", 0, 4, 7), (copy, 4, 2, 7), (copy, 1, 2, 20), (copy, 5, 1, 20)]
    assert [each.kind for each in intervals(recorded, on_gpu=True)] == [PRODUCT, COMMUNICATION, OTHER, COMMUNICATION]


def test_spans_that_touch_or_overlap_are_one() -> None:
    assert union([(5.0, 6.0), (0.0, 2.0), (1.0, 1.5), (2.0, 3.0), (3.5, 4.0)]) == [(0.0, 3.0), (3.5, 4.0), (5.0, 6.0)]
    assert union([]) == []
    running = [Interval(0.0, 2.0, PRODUCT, 0), Interval(1.0, 3.0, OTHER, 1), Interval(10.0, 0.5, OTHER, 1)]
    assert spans(running) == [(0.0, 4.0), (10.0, 10.5)]
    assert covered_ms(running) == 4.5


def test_no_events_are_no_intervals() -> None:
    assert intervals([("nccl:span", 0, 9, 13)], on_gpu=True) == []


class Event:
    """An event of torch's profiler."""

    def __init__(self, name: str, device: DeviceType, annotation: bool = False) -> None:
        self.named, self.device, self.annotation = name, device, annotation

    def name(self) -> str:
        return self.named

    def device_type(self) -> DeviceType:
        return self.device

    def is_user_annotation(self) -> bool:
        return self.annotation

    def start_ns(self) -> int:
        return 10

    def duration_ns(self) -> int:
        return 3

    def device_resource_id(self) -> int:
        return 7

    def start_thread_id(self) -> int:
        return 99


def test_events_of_a_profile_are_those_of_the_device() -> None:
    recorded = [
        Event("kernel", DeviceType.CUDA), Event("range", DeviceType.CUDA, True), Event("aten::mm", DeviceType.CPU),
        Event("gloo:all_gather", DeviceType.CPU, True),
    ]  # fmt: skip
    profile = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: recorded)))
    assert events(profile, on_gpu=True) == [("kernel", 10, 3, 7)]
    assert events(profile, on_gpu=False) == [("aten::mm", 10, 3, 99), ("gloo:all_gather", 10, 3, 99)]


def test_a_span_joins_the_one_right_before() -> None:
    assert union([(0.0, 1.0), (2.0, 3.0), (2.5, 4.0)]) == [(0.0, 1.0), (2.0, 4.0)]
    assert union([(0.0, 9.0), (2.0, 3.0), (10.0, 11.0)]) == [(0.0, 9.0), (10.0, 11.0)]
