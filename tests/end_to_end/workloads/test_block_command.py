"""`python -m tpbench` with the transformer block: real processes and their rows."""

from pathlib import Path

import pandas as pd
import pytest

import tpbench as package
from tests.support.command import tpbench
from tpbench.report.analysis.records import row_records
from tpbench.report.analysis.verdicts import disagreements
from tpbench.report.studies import study_document
from tpbench.results.current_rows import newest
from tpbench.results.read import load
from tpbench.workloads.tp_block.problem import TOLERANCE


def test_the_tiny_shape_runs_anywhere(tmp_path: Path) -> None:
    command = ("-m", "variant=block_no_tp,block_tp,block_tp_overlap,block_symm_mem", "shape=tiny_block_tp2")
    options = ("measure=quick", "min_iterations=3", "max_iterations=3", "device=cpu", "dtype=float32", "reuse=true",
               "profile=true", "layers=0,2")  # fmt: skip
    done = tpbench(*command, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    both = package.load(tmp_path / "outputs").set_index("variant")
    _stacks_are_trained_alike(both[both["layers"] == 2], tmp_path / "outputs")
    rows = both[both["layers"] == 0]
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
    assert len(kept) == 6  # each cell its own


def _stacks_are_trained_alike(rows: pd.DataFrame, outputs: Path) -> None:
    """Without parallelism, with plain parallelism and with overlap a stack has the same losses and gradient norms."""
    right = rows[rows["status"] == "ok"]
    assert set(right.index) == {"block_no_tp", "block_tp", "block_tp_overlap"} and right["rotary"].all()
    for name in ("losses", "grad_norms"):
        alone = list(right.loc["block_no_tp", name])
        assert len(alone) == 13 and alone == sorted(alone, reverse=True), "training lowers both"
        for variant in right.index:
            assert list(right.loc[variant, name]) == pytest.approx(alone, rel=TOLERANCE["float32"])
    assert right[["time_ms", "peak_gib"]].notna().all(axis=None)
    tables = study_document(rows.reset_index(), "profile").tables
    shown = {line[tables[0].columns.index("variant")]: line for table in tables for line in table.texts}
    loss = tables[0].columns.index("loss_value")
    printed = {shown[variant][loss] for variant in right.index}
    assert len(printed) == 1 and float(*printed) == pytest.approx(right["loss_value"].iloc[0], rel=1e-3)
    assert not disagreements(row_records(newest(load([outputs]))))
