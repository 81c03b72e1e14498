"""`python -m tpbench` with this workload: real processes, rows, and what a person reads."""

from pathlib import Path

import pytest

import tpbench as package
from tests.support.command import tpbench


def test_the_tiny_shape_runs_anywhere(tmp_path: Path) -> None:
    options = ("measure=quick", "min_iterations=3", "max_iterations=3", "device=cpu", "overlap_ms=2", "reuse=true")
    done = tpbench(
        "-m", "variant=dense_reduce_scatter,sparse_all_to_all", "shape=tiny_bigram_w2", *options, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = package.load(tmp_path / "outputs")
    assert list(rows["variant"]) == ["dense_reduce_scatter", "sparse_all_to_all"]
    assert set(rows["status"]) == {"ok"}
    assert list(rows["interpreted"]) == [False, True]
    assert set(rows["dp_size"]) == {2} and set(rows["tp_size"]) == {1}
    assert rows["grad_norm"].nunique() == 1
    sparse = rows.iloc[1]
    assert max(sparse["rank_bytes_sent"]) == sparse["bytes_communicated"]
    assert list(sparse["rank_bytes_received"]) == list(sparse["rank_bytes_sent"])[::-1]
    for phase in ("counts", "ids", "gather", "values", "merge"):
        assert sparse[f"{phase}_ms"] > 0
    assert rows.iloc[0]["reduce_ms"] > 0
    assert sparse["exposed_ms"] == pytest.approx(sparse["time_ms"] - sparse["stand_in_ms"])
    assert sparse["floor_ms"] > sparse["bytes_moved"] / sparse["copy_gb_per_s"] / 1e6
    assert "dense_reduce_scatter" in done.stdout and "0.119" in done.stdout  # the density
