"""Documents made from rows, and committed rows."""

import json
import math

import pytest

from tests.support.command import ROOT
from tpbench.report.analysis.grid import disagreements, row_records
from tpbench.results.current_rows import newest
from tpbench.results.read import load
from tpbench.workloads.train_step.documents import json_document


def test_committed_rows_train_stably() -> None:
    """Losses fall without a peak, and rows of one problem agree."""
    rows = load(ROOT / "outputs/reference", workload="train_step", status="ok")
    assert len(rows) and all(losses[-1] < losses[0] for losses in rows["losses"])
    assert all(max(losses) <= losses[0] * 1.0005 for losses in rows["losses"])
    assert not disagreements(row_records(newest(rows)))


CONFIG_KEYS = [
    "model_name", "impl", "tp_size", "dp_size", "batch_size", "seq_length", "learning_rate", "dtype", "autocast",
    "num_training_steps", "warmup_steps", "gradient_accumulation_steps", "activation_checkpointing", "world_size",
    "dataset_name", "dataset_percentage",
]  # fmt: skip
STEP_KEYS = [
    "step", "loss", "step_time_s", "forward_time_s", "backward_time_s", "optimizer_time_s", "tokens_per_sec",
    "samples_per_sec", "memory_allocated_gb", "memory_peak_gb",
]  # fmt: skip
SUMMARY_KEYS = [
    "num_steps", "avg_step_time_ms", "std_step_time_ms", "min_step_time_ms", "max_step_time_ms", "avg_tokens_per_sec",
    "avg_samples_per_sec", "avg_loss", "final_loss", "peak_memory_gb", "timing_breakdown",
]  # fmt: skip
JOB = {
    "model": "qwen3_32b", "variant": "autotp", "tp_size": 2, "dp_size": 2, "batch_size": 2, "seq_length": 8,
    "accumulate": 3, "autocast": True, "seed": 7, "learning_rate": 1e-5, "dtype": "bfloat16", "warmup_steps": 5,
    "steps": 2, "activation_checkpointing": False,
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
    config = content["config"]
    assert list(config)[: len(CONFIG_KEYS)] == CONFIG_KEYS and (config["seed"], config["world_size"]) == (7, 4)
    assert (config["model_name"], config["num_training_steps"]) == ("Qwen/Qwen3-32B", 7)
    first, last = content["steps"]
    assert list(first) == STEP_KEYS
    assert (first["loss"], last["loss"]) == (8.0, 7.0)  # warm-up is not among them
    assert (first["step"], first["step_time_s"], first["backward_time_s"]) == (5, 0.05, 0.02)  # after the warm-up
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
