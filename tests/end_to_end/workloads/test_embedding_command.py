"""`python -m tpbench` with this workload: real processes, rows, and what a person reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tpbench as package
from tests.support.command import ROOT, environment, refused, tpbench
from tests.support.composed_jobs import job
from tpbench.job import unsupported_reason
from tpbench.launcher.planning.plan import ThisHost, skip_reason


def test_the_tiny_shape_runs_anywhere(tmp_path: Path) -> None:
    options = ("measure=quick", "min_iterations=3", "max_iterations=3", "device=cpu", "overlap_ms=2",
               "merge=index_add,triton", "reuse=true")  # fmt: skip
    done = tpbench(
        "-m", "variant=dense_reduce_scatter,sparse_all_to_all", "shape=tiny_bigram_w2", *options, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = package.load(tmp_path / "outputs")
    assert list(rows["variant"]) == ["dense_reduce_scatter", "sparse_all_to_all", "sparse_all_to_all"]
    assert set(rows["status"]) == {"ok"}
    assert list(rows["interpreted"]) == [False, False, True]
    assert set(rows["dp_size"]) == {2} and set(rows["tp_size"]) == {1}
    assert rows["grad_norm"].nunique() == 1
    sparse = rows.iloc[1]
    assert max(sparse["rank_bytes_sent"]) == sparse["bytes_communicated"]
    assert list(sparse["rank_bytes_received"]) == list(sparse["rank_bytes_sent"])[::-1]
    for phase in ("counts", "ids", "gather", "values", "merge"):
        assert sparse[f"{phase}_ms"] > 0
    assert sparse["early_wall_ms"] > 0 and sparse["late_wall_ms"] > 0
    assert rows.iloc[0]["reduce_ms"] > 0
    assert sparse["exposed_ms"] == pytest.approx(sparse["time_ms"] - sparse["stand_in_ms"])
    assert sparse["floor_ms"] > sparse["bytes_moved"] / sparse["copy_gb_per_s"] / 1e6
    assert "dense_reduce_scatter" in done.stdout and "0.119" in done.stdout  # the density
    script = str(ROOT / "scripts/report.py")
    line = [sys.executable, script, "outputs", "--study", "crossover", "--format", "markdown"]
    said = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "| 11.9% |" in said.stdout


REFUSED: list[tuple[list[str], list[str]]] = [
    (["variant=sparse_auto"], ["the shape is of entropy_loss", "bigram_w2", "tiny_bigram_w2"]),
    (["variant=triton_tp", "merge=triton"], ["no field of entropy_loss is called merge"]),
    (["variant=sparse_auto", "shape=tiny_bigram_w2", "vocab=3"], ["no field of embedding_grad is called vocab"]),
    (["variant=sparse_auto", "shape=tiny_bigram_w2", "tp_size=2"], ["tp_size=2 must be 1"]),
    (["variant=sparse_auto", "shape=tiny_bigram_w2", "transfers=late"], ["transfers=late needs overlap_ms"]),
    (
        ["variant=sparse_auto", "shape=tiny_bigram_w2", "loss=forward_kl"],
        ["no field of embedding_grad is called loss"],
    ),
    (
        ["variant=sparse_auto", "shape=tiny_bigram_w2", "block_cap=4096"],
        ["no field of embedding_grad is called block_cap"],
    ),
    (
        ["variant=sparse_auto", "shape=tiny_bigram_w2", "transfers=first"],
        ["transfers=first does not exist", "beside"],
    ),
]


def test_wrong_input_gets_one_message(tmp_path: Path) -> None:
    refused(REFUSED, tmp_path)


EXPERIMENTS = sorted(file.stem for file in (ROOT / "conf/experiment").glob("sparse_grad*.yaml"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_choice_of_an_experiment_makes_a_job(name: str) -> None:
    content = yaml.safe_load((ROOT / "conf/experiment" / f"{name}.yaml").read_text())
    swept = content["hydra"]["sweeper"]["params"]
    choices = {key: str(values).split(",") for key, values in swept.items()}
    first = {key: values[0] for key, values in choices.items()}
    lines = [{**first, key: value} for key, values in choices.items() for value in values]  # each choice once
    made = [job(*(f"{key}={value}" for key, value in line.items())) for line in lines]
    jobs = {each.key: each for each in made}
    assert {each.workload.name for each in jobs.values()} == {"embedding_grad"}
    assert not [each for each in jobs.values() if unsupported_reason(each)]
    if name == "sparse_grad_density":
        expected = {each.problem.tokens / each.problem.table_rows for each in jobs.values()}
        assert min(expected) < 0.011 and max(expected) == 1.0


def test_what_gpus_cannot_do_is_skipped_there() -> None:
    cell = job("variant=torch_sparse_all_reduce", "shape=tiny_bigram_w2", "device=cuda")
    assert skip_reason(cell, ThisHost(gpus=2)) == "NCCL has no sparse all-reduce"
    assert job("variant=sparse_auto", "shape=bigram_w4").uses_triton
    assert not job("variant=sparse_auto", "shape=bigram_w4", "merge=index_add").uses_triton
    assert "float16" in str(
        unsupported_reason(job("variant=torch_sparse_all_reduce", "shape=bigram_w2", "dtype=float16"))
    )
