"""Columns and documents that follow from a measured run."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from tests.support.train_step import CPU, single_context, tiny_problem
from tpbench.measure.timeline import intervals
from tpbench.workloads.train_step.json_document import json_document
from tpbench.workloads.train_step.phase_times import PhaseTimer
from tpbench.workloads.train_step.profiling import exposed_share
from tpbench.workloads.train_step.reference import Reference, compare
from tpbench.workloads.train_step.throughput import peak_tflops, throughput


@pytest.mark.parametrize(
    ("kernels", "share"),
    [
        ([], 0.0),
        ([("gemm", 0, 10, 7)], 0.0),
        ([("ncclDevKernel_AllReduce", 0, 10, 7)], 1.0),
        ([("gemm", 0, 6, 7), ("ncclDevKernel_AllGather", 4, 6, 8)], 0.4),
        ([("ncclKernel", 2, 2, 8), ("gemm", 0, 10, 7)], 0.0),
        (
            [("gemm", 0, 2, 7), ("ncclKernel", 1, 4, 8), ("Memcpy PtoP (Device -> Device)", 4, 2, 9), ("add", 8, 2, 7)],
            0.4,
        ),
        # async-TP: a stream that only copies reads memory of peers, whichever name the copy has. Ranges are no work.
        ([("gemm", 0, 6, 7), ("Memcpy DtoD (Device -> Device)", 4, 6, 9)], 0.4),
        ([("gemm", 0, 6, 7), ("Memcpy DtoD (Device -> Device)", 6, 4, 7)], 0.0),
        ([("gemm", 0, 6, 7), ("void c10d::symmetric_memory::barrier_kernel(unsigned int**)", 6, 4, 7)], 0.4),
        ([("FSDP::all_gather", 0, 99, 7), ("nccl:_all_gather_base", 0, 99, 8), ("gemm", 0, 6, 7)], 0.0),
    ],
)
def test_the_share_of_exposed_communication(kernels: list[tuple[str, int, int, int]], share: float) -> None:
    assert exposed_share(intervals(kernels, on_gpu=True)) == pytest.approx(share)


def test_a_phase_timer_adds_up_phases_that_come_again() -> None:
    timer = PhaseTimer(CPU)
    for phase in ("forward", "backward", "forward", "backward", "optimizer"):
        timer.mark(phase)
    times_ms = timer.finish()
    assert set(times_ms) == {"forward", "backward", "optimizer"} and all(ms >= 0 for ms in times_ms.values())
    assert timer.marks == []


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA H100 80GB HBM3", "float16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA A100-SXM4-80GB", "float32", 156),
        ("NVIDIA H20", "bfloat16", 148),
        ("Tesla T4", "bfloat16", None),
    ],
)
def test_peaks_of_datasheets(name: str, dtype: str, peak: float | None) -> None:
    assert peak_tflops(name, dtype) == peak


def test_throughput_counts_replicas_and_accumulation() -> None:
    context = replace(single_context(), dp_size=2, world_size=4)
    found = throughput(tiny_problem(accumulate=3), context, {"time_ms": 500.0, "flops": 10**12})
    assert found["samples_per_s"] == 2 * 3 * 2 / 0.5
    assert found["tokens_per_s"] == 16 * found["samples_per_s"]
    assert found["tokens_per_s_per_gpu"] == found["tokens_per_s"] / 4
    assert found["tflops_per_gpu"] == 2.0


def test_the_tolerance_of_norms_grows_with_each_step() -> None:
    """Rounding differences grow with each update. The tolerance of losses is constant."""
    right = Reference("", (9.0, 8.0, 7.0), (2.0, 2.0, 2.0))
    for step, allowed in enumerate((0.02, 0.04, 0.08)):
        for off, fine in ((allowed * 0.9, True), (allowed * 1.1, False), (float("nan"), False)):
            norms = [*right.norms]
            norms[step] *= 1 + off
            complaint = compare(right, right.losses, norms).complaint("bfloat16")
            assert (complaint is None) is fine
            assert fine or f"at step {step + 1}" in str(complaint)
        losses = [*right.losses]
        losses[step] *= 1.003
        assert "loss_error" in str(compare(right, losses, right.norms).complaint("bfloat16"))


def test_only_measured_rows_make_documents() -> None:
    row = {
        "status": "ok", "job": json.dumps({"batch_size": 2, "seq_length": 8, "accumulate": 3}), "variant": "autotp",
        "tp_size": 2, "dp_size": 2, "world_size": 4, "samples_ms": [50.0, 150.0], "device_samples_ms": None,
        "losses": [9.0, 8.0, 7.0], "grad_norms": [1.0, 2.0, 3.0], "peak_gib": 1.5, "forward_ms": 1.0,
        "backward_ms": 2.0, "optimizer_ms": None,
    }  # fmt: skip
    result = json_document(row)
    assert result is not None
    name, content = result
    assert name == "results_autotp_tp2_dp2"
    assert [step["loss"] for step in content["steps"]] == [8.0, 7.0]  # warm-up is not among them
    summary = content["summary"]
    assert summary["tokens_per_second"] == 2 * 8 * 3 * 2 / 0.1 == 8 * summary["samples_per_second"]
    assert (summary["avg_step_ms"], summary["avg_loss"], summary["final_loss"]) == (100.0, 7.5, 7.0)
    assert summary["std_step_ms"] == pytest.approx(50 * math.sqrt(2)) and summary["peak_memory_gib"] == 1.5
    assert "forward_pct" not in content["summary"]
    assert json_document({**row, "status": "oom"}) is None
