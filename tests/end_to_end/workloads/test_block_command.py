"""`python -m tpbench` with this workload: real processes, rows, and what a person reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

import tpbench as package
from tests.support.command import ROOT, refused, tpbench
from tpbench.job import Job, parse_job, refusal
from tpbench.launcher.target import ThisHost, skip_reason
from tpbench.workloads.tp_block import WORKLOAD


def test_the_tiny_shape_runs_anywhere(tmp_path: Path) -> None:
    done = tpbench("-m", "variant=block_no_tp,block_tp,block_tp_overlap,block_symm_mem", "shape=tiny_block_tp2",
                   "measure=quick", "device=cpu", "dtype=float32", "reuse=true", "profile=true",
                   cwd=tmp_path)  # fmt: skip
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


@pytest.fixture(scope="module", autouse=True)
def composing() -> Iterator[None]:
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def composed(*overrides: str) -> dict[str, Any]:
    found = OmegaConf.to_container(hydra.compose("config", overrides=list(overrides)))
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


def job(*overrides: str) -> Job:
    return parse_job(composed(*overrides))


@pytest.mark.parametrize("name", ["tp_overlap", "tp_overlap_mlp", "tp_overlap_memory"])
def test_every_choice_of_an_experiment_makes_a_job(name: str) -> None:
    content = yaml.safe_load((ROOT / "conf/experiment" / f"{name}.yaml").read_text())
    choices = {key: str(values).split(",") for key, values in content["hydra"]["sweeper"]["params"].items()}
    first = {key: values[0] for key, values in choices.items()}
    lines = [{**first, key: value} for key, values in choices.items() for value in values]
    own = {"part", "save_gathered"}  # no default of these stands in config.yaml
    made = [job(*(f"{'++' * (key in own)}{key}={value}" for key, value in line.items())) for line in lines]
    assert {each.workload.name for each in made} == {"tp_block"} and not [each for each in made if refusal(each)]
    if name == "tp_overlap":
        assert {each.variant for each in made} == set(WORKLOAD.variants)


@pytest.mark.parametrize("shape", sorted(file.stem for file in (ROOT / "conf/shape").glob("*_block_*.yaml")))
def test_shapes_fit_every_variant_at_every_length_that_is_measured(shape: str) -> None:
    values = composed("variant=block_tp", f"shape={shape}")
    for tokens in (values["tokens"], *(() if shape.startswith("tiny") else (512, 2048))):
        for name in WORKLOAD.variants:
            assert refusal(parse_job({**values, "tokens": tokens, "variant": name})) is None
    assert f"tp{values['tp_size']}" == shape.rpartition("_")[2]


def test_what_needs_a_gpu_is_skipped_on_a_cpu() -> None:
    for name, variant in WORKLOAD.variants.items():
        reason = skip_reason(job(f"variant={name}", "shape=tiny_block_tp2", "device=cpu"), ThisHost(gpus=0))
        assert reason == ("needs a CUDA GPU" if variant.needs_cuda else None)
