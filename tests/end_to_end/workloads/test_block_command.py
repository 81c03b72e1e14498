"""`python -m tpbench` with the transformer block: real processes, rows and messages."""

from __future__ import annotations

from pathlib import Path

import pytest

import tpbench as package
from tests.support.command import refused, tpbench
from tests.support.documented import documented


def test_the_tiny_shape_runs_anywhere(tmp_path: Path) -> None:
    command = documented("shape=tiny_block_tp2")
    done = tpbench(*command, "measure=quick", "device=cpu", "dtype=float32", "reuse=true", "profile=true", cwd=tmp_path)
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
    assert len(overlap["timeline_ms"]) == len(overlap["timeline_kind"]) > 20 and 1.0 in overlap["timeline_kind"]
    assert "block_tp_overlap" in done.stdout and "skipped" in done.stdout
    kept = {file.parent for file in (tmp_path / "outputs").glob("sweeps/*/*/**/trace_rank1.json.gz")}
    assert len(kept) == 3  # each cell its own


REFUSED: list[tuple[list[str], list[str]]] = [
    (["variant=block_tp"], ["the shape is of entropy_loss", "llama8b_block_tp4", "tiny_block_tp2"]),
    (["variant=block_tp", "shape=tiny_block_tp2", "tp_size=3"], ["tokens=64 must divide by tp_size=3"]),
    (["variant=block_tp_overlap", "shape=tiny_block_tp4", "tokens=8"], ["tokens=8 must divide by tp_size^2=16"]),
    (["variant=block_tp", "shape=tiny_block_tp2", "part=attention"], ["part=attention does not exist", "mlp"]),
]


def test_wrong_input_gets_one_message(tmp_path: Path) -> None:
    refused(REFUSED, tmp_path)
