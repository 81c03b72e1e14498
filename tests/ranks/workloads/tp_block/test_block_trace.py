"""What is read from a profiler's trace."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import context, place, problem
from tpbench.measure.timeline import COMMUNICATION, OTHER, PRODUCT, Interval, intervals, kind_of
from tpbench.workloads.tp_block import WORKLOAD, trace


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


def test_times_that_overlap_are_counted_once() -> None:
    def made(kind: int, *spans: tuple[float, float]) -> list[Interval]:
        return [Interval(start, end - start, kind, 0) for start, end in spans]

    communication = made(COMMUNICATION, (0, 4), (2, 6), (10, 12))  # 8 ms: 0 to 6 and 10 to 12
    products = made(PRODUCT, (1, 3), (2, 4), (5, 11))  # of which 1 to 4, 5 to 6 and 10 to 11
    assert trace.overlap_fraction([*communication, *products, *made(OTHER, (0, 100))]) == pytest.approx(5 / 8)
    assert trace.overlap_fraction(products) is None
    assert trace.overlap_fraction(communication) == 0.0


def test_intervals_begin_at_the_first_and_number_their_lanes() -> None:
    events = [("gemm", 5_000_000, 2_000_000, 77), ("ncclKernel", 4_000_000, 500_000, 13), ("nccl:span", 0, 9, 13)]
    assert intervals(events, on_gpu=True) == [Interval(0.0, 0.5, COMMUNICATION, 0), Interval(1.0, 2.0, PRODUCT, 1)]


def test_a_stream_of_copies_alone_is_communication() -> None:
    copy = "Memcpy DtoD (Device -> Device)"
    events = [("gemm", 0, 4, 7), (copy, 4, 2, 7), (copy, 1, 2, 20), (copy, 5, 1, 20)]
    assert [each.kind for each in intervals(events, on_gpu=True)] == [PRODUCT, COMMUNICATION, OTHER, COMMUNICATION]


def traced(here: Rank, folder: Path, keep: bool) -> dict[str, Any]:
    cell = problem(part="mlp")
    prepared = WORKLOAD.variants["block_tp"].prepare(cell, place(here, cell))
    place_of = replace(context(here), folder=folder)
    return trace.of_step(lambda: prepared.run(prepared.x).backward(prepared.grad), place_of, keep=keep)


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
def test_a_step_is_traced_and_kept(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, traced, tmp_path, True)
    kinds = first["timeline_kind"]
    assert kinds.count(PRODUCT) >= 6 and kinds.count(COMMUNICATION) >= 4
    assert len({len(values) for name, values in first.items() if name.startswith("timeline")}) == 1
    assert first["timeline_start_ms"] == sorted(first["timeline_start_ms"]) and min(first["timeline_ms"]) >= 0
    kept = sorted(tmp_path.iterdir())
    assert [file.name for file in kept] == ["trace_rank0.json.gz", "trace_rank1.json.gz"]
    with gzip.open(kept[1]) as file:
        assert json.load(file)["traceEvents"]
    first, second = run_on_ranks(2, traced, tmp_path / "nowhere", False)
    assert first and not second
