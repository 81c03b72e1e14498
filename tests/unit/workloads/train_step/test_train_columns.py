"""Columns and documents that follow from a measured run."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.train_step import CPU, single_context, tiny_problem
from tpbench.measure.gpu_profiler import intervals
from tpbench.workloads.train_step.documents import json_document
from tpbench.workloads.train_step.estimates import rank_flops
from tpbench.workloads.train_step.reference import Reference, compare
from tpbench.workloads.train_step.speed import peak_tflops, throughput
from tpbench.workloads.train_step.training import measured_step
from tpbench.workloads.train_step.training.measured_step import PhaseTimer, exposed_share


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


def test_a_phase_timer_adds_up_phases_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of this test moves by 1, 2, 3... seconds from mark to mark."""
    readings = iter(number * (number + 1) / 2 for number in range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    timer = PhaseTimer(CPU)
    for _ in range(2):
        for phase in ("forward", "backward", "forward", "backward", "optimizer"):
            timer.mark(phase)
        timer.end_step()
    first, second = [1e3 * (1 + 3), 1e3 * (2 + 4), 1e3 * 5], [1e3 * (7 + 9), 1e3 * (8 + 10), 1e3 * 11]
    assert timer.times_ms(2) == [first, second]
    assert timer.times_ms(1) == [second]  # without the warm-up


def test_a_replay_gives_its_graphs_marks_new_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph records the same events at each replay, so their times are read between replays."""
    recorded_ms = {}
    monkeypatch.setattr(measured_step, "_between_ms", lambda begin, end: recorded_ms[end] - recorded_ms[begin])
    marks: Any = [("forward", "event 0"), ("backward", "event 1"), ("optimizer", "event 2"), ("end", "event 3")]
    timer = PhaseTimer(CPU)
    for lengths in ((1, 2, 3), (4, 5, 6)):
        recorded_ms.update({event: sum(lengths[:at]) for at, (_, event) in enumerate(marks)})
        timer.end_replay(marks)
        timer.read()
    assert timer.times_ms(2) == [[1, 2, 3], [4, 5, 6]]


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


def test_model_flops_utilisation_counts_repeated_operations_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations of a rank may contain blocks that every rank of the replica repeats."""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    context = replace(single_context(torch.device("cuda")), tp_size=2, world_size=2)
    shared = tiny_problem(dtype="bfloat16")
    repeated = replace(shared, tp_mapping='{"layers.*": "replicated"}')
    found = {
        each: throughput(each, context, {"time_ms": 1.0, "flops": rank_flops(each, "fsdp_dtensor", 2)})
        for each in (shared, repeated)
    }
    assert found[shared]["mfu"] == found[repeated]["mfu"] == pytest.approx(found[shared]["tflops_per_gpu"] / 989)
    assert found[repeated]["tflops_per_gpu"] > 1.5 * found[shared]["tflops_per_gpu"]


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


STEP_KEYS = [
    "step", "loss", "step_time_s", "forward_time_s", "backward_time_s", "optimizer_time_s", "tokens_per_sec",
    "samples_per_sec", "memory_allocated_gb", "memory_peak_gb",
]  # fmt: skip
SUMMARY_KEYS = [
    "num_steps", "avg_step_time_ms", "std_step_time_ms", "avg_tokens_per_sec", "avg_samples_per_sec", "avg_loss",
    "final_loss", "peak_memory_gb", "timing_breakdown",
]  # fmt: skip
JOB = {
    "model": "tiny", "variant": "autotp", "tp_size": 2, "dp_size": 2, "batch_size": 2, "seq_length": 8, "accumulate": 3,
    "autocast": True, "seed": 7,
}  # fmt: skip
ROW = {
    "status": "ok", "job": json.dumps(JOB), "variant": "autotp", "tp_size": 2, "dp_size": 2, "world_size": 4,
    "samples_ms": [50.0, 150.0], "device_samples_ms": None, "losses": [9.0, 8.0, 7.0], "grad_norms": [1.0, 2.0, 3.0],
    "peak_gib": 1.5, "forward_ms": 10.0, "backward_ms": 20.0, "optimizer_ms": 30.0, "step_forward_ms": [10.0, 20.0],
    "step_backward_ms": [20.0, 30.0], "step_optimizer_ms": [5.0, 15.0], "iteration_held_gib": [1.0, 2.0],
    "iteration_peak_gib": [1.5, 2.5],
}  # fmt: skip


def test_only_measured_rows_make_documents() -> None:
    result = json_document(ROW)
    assert result is not None
    name, content = result
    assert name == "results_autotp_tp2_dp2" and list(content) == ["config", "steps", "summary"]
    names = ["model_name", "impl", "tp_size", "dp_size", "batch_size", "seq_length", "autocast"]
    assert list(content["config"])[:7] == names and content["config"]["seed"] == 7
    first, last = content["steps"]
    assert list(first) == STEP_KEYS
    assert (first["loss"], last["loss"]) == (8.0, 7.0)  # warm-up is not among them
    assert (first["step"], first["step_time_s"], first["backward_time_s"]) == (1, 0.05, 0.02)
    assert first["tokens_per_sec"] == 2 * 8 * 3 * 2 / 0.05 == 8 * first["samples_per_sec"]
    assert (last["memory_allocated_gb"], last["memory_peak_gb"]) == (2 * 2**30 / 1e9, 2.5 * 2**30 / 1e9)
    summary = content["summary"]
    assert list(summary) == SUMMARY_KEYS
    assert summary["avg_tokens_per_sec"] == 2 * 8 * 3 * 2 / 0.1 == 8 * summary["avg_samples_per_sec"]
    assert (summary["num_steps"], summary["avg_step_time_ms"]) == (2, 100.0)
    assert (summary["avg_loss"], summary["final_loss"]) == (7.5, 7.0)
    assert summary["std_step_time_ms"] == pytest.approx(50 * math.sqrt(2))
    assert summary["peak_memory_gb"] == pytest.approx(1.5 * 2**30 / 1e9)
    assert summary["timing_breakdown"] == pytest.approx(
        {"forward_pct": 15, "backward_pct": 25, "optimizer_pct": 10, "other_pct": 50}
    )
    assert json_document({**ROW, "status": "oom"}) is None


def test_documents_of_older_rows_have_null_for_what_was_not_recorded() -> None:
    result = json_document({name: value for name, value in ROW.items() if not name.startswith(("step_", "iteration_"))})
    assert result is not None
    first, summary = result[1]["steps"][0], result[1]["summary"]
    assert list(first) == STEP_KEYS and first["forward_time_s"] is None and first["memory_peak_gb"] is None
    assert summary["timing_breakdown"]["optimizer_pct"] == pytest.approx(30)  # of the median
    assert summary["timing_breakdown"]["other_pct"] == pytest.approx(40)
