"""Intervals of a profiled step and their kinds."""

from __future__ import annotations

import pytest

from tpbench.measure.timeline import COMMUNICATION, OTHER, PRODUCT, Interval, intervals, kind_of


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
    events = [("gemm", 5_000_000, 2_000_000, 77), ("ncclKernel", 4_000_000, 500_000, 13), ("nccl:span", 0, 9, 13)]
    assert intervals(events, on_gpu=True) == [Interval(0.0, 0.5, COMMUNICATION, 0), Interval(1.0, 2.0, PRODUCT, 1)]


def test_a_stream_of_copies_alone_is_communication() -> None:
    copy = "Memcpy DtoD (Device -> Device)"
    events = [("gemm", 0, 4, 7), (copy, 4, 2, 7), (copy, 1, 2, 20), (copy, 5, 1, 20)]
    assert [each.kind for each in intervals(events, on_gpu=True)] == [PRODUCT, COMMUNICATION, OTHER, COMMUNICATION]
