"""`python -m tpbench` with the transformer block: real processes and their rows."""

from pathlib import Path

import pytest

import tpbench as package
from tests.support.command import tpbench


def test_the_tiny_shape_runs_anywhere(tmp_path: Path) -> None:
    command = ("-m", "variant=block_no_tp,block_tp,block_tp_overlap,block_symm_mem", "shape=tiny_block_tp2")
    options = ("measure=quick", "min_iterations=3", "max_iterations=3", "device=cpu", "dtype=float32", "reuse=true",
               "profile=true")  # fmt: skip
    done = tpbench(*command, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = package.load(tmp_path / "outputs").set_index("variant")
    assert dict(rows["status"]) == {
        "block_no_tp": "ok", "block_tp": "ok", "block_tp_overlap": "ok", "block_symm_mem": "skipped",
    }  # fmt: skip
    assert rows.loc["block_symm_mem", "reason"] == "needs a CUDA GPU"
    right = rows[rows["status"] == "ok"]
    for name in ("loss_value", "grad_norm"):
        assert right[name].tolist() == pytest.approx([float(right[name].iloc[0])] * 3, rel=1e-5)
    assert right["grad_norm"].min() > 1
    assert right[["forward_ms", "backward_ms"]].notna().all(axis=None)
    overlap, alone = right.loc["block_tp_overlap"], right.loc["block_no_tp"]
    assert overlap["tflops"] == pytest.approx(overlap["flops"] / overlap["time_ms"] / 1e9)
    assert overlap["gemm_share"] == pytest.approx(overlap["tflops"] / overlap["gemm_tflops"])
    assert overlap["hidden_share"] == pytest.approx(1 - overlap["exposed_ms"] / overlap["communication_ms"])
    assert overlap["flops"] * 2 == alone["flops"] and alone["bytes_communicated"] == 0
    assert overlap["floor_ms"] >= overlap["flops"] / overlap["gemm_tflops"] / 1e9 * 0.999
    assert "block_tp_overlap" in done.stdout and "skipped" in done.stdout
    kept = {file.parent for file in (tmp_path / "outputs").glob("sweeps/*/*/**/trace_rank1.json.gz")}
    assert len(kept) == 3  # each cell its own
