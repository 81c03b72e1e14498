"""`python -m tpbench` with the train step: real processes, rows, tables and messages."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import tpbench as package
from tests.support.command import ROOT, refused, tpbench
from tests.support.composed_jobs import job
from tpbench.job import Job, parse_job, unsupported_reason
from tpbench.launcher.attempt import new_task, store
from tpbench.launcher.planning.plan import ThisHost, skip_reason
from tpbench.report.pivot import pivot
from tpbench.report.studies import study_document
from tpbench.results.read import plain_rows
from tpbench.suggestions import number
from tpbench.worker.task import Task

STEPS = ("steps=6", "warmup_steps=2", "log_interval=2")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run two cells: one by DeepSpeed, one of a preset in the user's folder with tpbench's kernels.

    Cells whose iterations are counted are measured in one go, although the sweep asks to interleave them.
    """
    folder = tmp_path_factory.mktemp("train")
    (folder / "site/variant").mkdir(parents=True)
    lines = (
        "# @package _global_",
        "defaults:",
        "  - /workload/train_step",
        "variant: fsdp_dtensor",
        "train_loss: tpbench",
    )
    (folder / "site/variant/ours.yaml").write_text("\n".join(lines))
    line = ["-m", "variant=autotp,ours", "--config-dir", "site", "shape=tiny_train_tp2"]
    return folder, tpbench(*line, *STEPS, "device=cpu", "profile=true", "reuse=true", "order=interleaved", cwd=folder)


@pytest.fixture(scope="module")
def rows(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> list[dict[str, Any]]:
    folder, done = swept
    assert done.returncode == 0, done.stderr
    return plain_rows(package.load(folder / "outputs"))


def test_the_tiny_shape_trains_anywhere(rows: list[dict[str, Any]]) -> None:
    assert [(row["variant"], row["train_loss"], row["status"], row["interpreted"]) for row in rows] == [
        ("autotp", "torch", "ok", False), ("fsdp_dtensor", "tpbench", "ok", True),
    ]  # fmt: skip
    for row in rows:
        assert len(row["samples_ms"]) == row["iterations"] == 6
        assert len(row["losses"]) == len(row["grad_norms"]) == 8
        assert row["losses"][-1] < row["losses"][0]
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5)
        assert row["grad_norms"] == pytest.approx(rows[0]["grad_norms"], rel=1e-3)
        assert row["oracle"] == "3 steps by one process"
        assert (row["tokens"], row["parameters"], row["num_layers"]) == (64, 164224, 2)
        assert row["tokens_per_s"] == pytest.approx(64 / row["time_ms"] * 1e3)
        assert row["peak_gib"] > 0 and row["steady_gib"] > 0 and row["init_s"] > 0
        stay = row["expected_model_gib"] + row["expected_optimizer_gib"]
        passing = [row["expected_gradients_gib"], row["expected_activations_gib"]]
        assert stay + max(passing) <= row["expected_gib"] * 1.001 <= (stay + sum(passing)) * 1.01
        assert row["mfu"] is None
        assert row["not_interleaved"] == "each iteration continues the one before" and row["interleaved"] is None


def test_progress_and_traces_are_beside_the_logs(rows: list[dict[str, Any]], swept: Any) -> None:
    folder = Path(rows[0]["log_dir"])
    folder = folder if folder.is_absolute() else swept[0] / "outputs" / folder
    said = "".join(log.read_text() for log in folder.glob("**/0/stderr.log"))
    line = f"step 4/8: loss {rows[0]['losses'][3]:.4f}, "
    assert line in said and "tokens/s" in said
    assert line in swept[1].stdout and swept[1].stdout.count("step 4/8: ") == 2  # of either cell, also on the screen
    assert said.count("step 8/8:") == 1 and "step 10/8:" not in said
    assert len(list(folder.glob("trace_rank*.json.gz"))) == 2


def test_the_sweep_ends_with_a_table_without_warnings(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = swept
    assert "tiny_qwen3" in done.stdout.split("time_ms")[-1]
    assert "train_loss=tpbench" in done.stdout
    assert "Warning" not in done.stdout


def test_rows_as_json_documents(rows: list[dict[str, Any]], swept: Any) -> None:
    files = sorted((swept[0] / "outputs").glob("*.json"))
    plain = ["results_autotp_tp2_dp1.json", "results_fsdp_dtensor_tp2_dp1.json"]
    assert [file.name for file in files] == plain
    content = json.loads(files[0].read_text())
    assert content["config"]["model_name"] == "tiny_qwen3" and content["config"]["steps"] == 6
    assert [step["step"] for step in content["steps"]] == [2, 3, 4, 5, 6, 7]  # after 2 warm-up steps
    assert list(json.loads(files[1].read_text())) == list(content)
    assert sum(content["summary"]["timing_breakdown"].values()) == pytest.approx(100)
    assert all(0 < step["forward_time_s"] < step["step_time_s"] for step in content["steps"])
    assert all(0 < step["memory_allocated_gb"] <= step["memory_peak_gb"] for step in content["steps"])


def test_the_training_study(rows: list[dict[str, Any]], swept: Any) -> None:
    frame = package.load(swept[0] / "outputs")
    (table,) = study_document(frame, "training").tables
    lines = [dict(zip(table.columns, line, strict=True)) for line in table.texts]
    assert len(lines) == 2
    speeds = [float(each) for each in frame["tokens_per_s_per_gpu"]]
    as_fast = sum(f"{max(speeds) / each:.2f}" == "1.00" for each in speeds)  # as fast as the best, to two digits
    assert sum(line["of best"] == "1.00x" for line in lines) == as_fast
    assert table.facts["model"] == "tiny_qwen3" and all(float(line["expected_gib"]) > 0 for line in lines)
    assert not pivot(frame, "tokens_per_s_per_gpu").warnings


REFUSED: list[tuple[list[str], list[str]]] = [
    (["variant=autotp"], ["the shape is of entropy_loss", "list train_step shows its shapes"]),
    (["variant=autotp", "shape=tiny_train_tp2", "model=qwen3_9b"], ["no model is called qwen3_9b", "model=./FOLDER"]),
    (["variant=ddp", "shape=tiny_train_tp2"], ["it has no tensor parallelism: tp_size must be 1, got 2"]),
    (["variant=autotp", "shape=tiny_train_tp2", "zero_stage=3"], ["zero_stage=3 does not exist (valid: 0, 1, 2)"]),
    (["variant=autotp", "shape=tiny_train_tp2", "graph=true"], ["cannot be captured", "DeepSpeed reads"]),
    (["variant=fsdp", "shape=tiny_train_dp2", "graph=true", "warmup_steps=0"], ["warmup_steps must be at least 1"]),
    (["variant=ddp", "shape=tiny_train_dp2", "graph=true"], ["ddp cannot be captured in a CUDA graph"]),
    (["variant=fsdp", "shape=tiny_train_dp2", "model=no/such/folder"], ["no/such/folder/config.json cannot be"]),
]  # fmt: skip


def test_wrong_input_gets_one_message(tmp_path: Path) -> None:
    refused(REFUSED, tmp_path)


def test_fields_on_the_command_line() -> None:
    assert job("variant=fsdp_dtensor", "shape=qwen3_0p6b_tp2").problem.model == "qwen3_0p6b"
    large = job("variant=autotp", "shape=qwen3_8b_dp2_tp2", "model=llama3_70b", "num_layers=4", "train_loss=tpbench")
    assert (large.problem.model, large.problem.num_layers, large.problem.layers) == ("llama3_70b", 4, 80)
    assert (large.dp_size, large.tp_size, large.problem.train_loss) == (2, 2, "tpbench")
    shared = job("variant=autotp", "shape=qwen3_8b_tp4", "tp_size=auto", "world_size=8", "dp_size=2")
    assert (shared.tp_size, shared.dp_size) == (4, 2)
    assert shared.key == job("variant=autotp", "shape=qwen3_8b_tp4", "dp_size=2").key
    ours = ("variant=fsdp_dtensor", "shape=qwen3_8b_tp4")
    plain, others = job(*ours), job(*ours, "zero_stage=2", "overlap=true", "log_interval=3", "num_layers=0")
    assert others.key == plain.key and job(*ours, "num_layers=36").key == plain.key and not unsupported_reason(others)
    assert job("variant=fsdp", "shape=qwen3_8b_dp4", "vocab_parallel=false").problem.vocab_parallel


def test_a_folders_config_json_is_part_of_the_key(tmp_path: Path) -> None:
    """Otherwise a resumed sweep would take the row of another model."""
    config, task_file = tmp_path / "config.json", tmp_path / "task.json"
    content = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip

    def made(**more: Any) -> Job:
        config.write_text(json.dumps(content | more))
        return job("variant=fsdp_dtensor", "shape=tiny_train_tp2", f"model={tmp_path}")

    first = made()
    assert made(transformers_version="5.0.0", torch_dtype="float16").key == first.key
    others = [
        made(attention_bias=True),
        made(hidden_act="gelu"),
        made(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    ]
    assert len({each.key for each in (first, *others)}) == 4
    task = new_task(first, tmp_path)
    assert task.columns["config_hash"] == first.problem.config_hash
    task.save(task_file)
    assert Task.load(task_file).job.key == first.key  # although the folder has changed
    config.unlink()
    assert Task.load(task_file).job.key == first.key
    assert new_task(job("variant=fsdp", "shape=tiny_train_dp2"), tmp_path).columns["config_hash"] is None


def test_every_shape_of_an_experiment_has_variants() -> None:
    for file in sorted((ROOT / "conf/experiment").glob("train_step*.yaml")):
        experiment = yaml.safe_load(file.read_text())
        swept = experiment["hydra"]["sweeper"]["params"]
        (chosen,) = experiment.get("defaults", [{}])  # another shape for all cells
        last = [f"{name}={str(values).rpartition(',')[2].lower()}" for name, values in swept.items()]
        for shape in swept.get("shape", chosen.get("override /shape")).split(","):
            composed = job(*last, f"shape={shape}").flat()
            jobs = [parse_job({**composed, "variant": name}) for name in swept["variant"].split(",")]
            assert sum(unsupported_reason(each) is None for each in jobs) >= (3 if file.stem == "train_step" else 1)
            assert file.stem == "train_step" or {each.world_size for each in jobs} == {2}


def test_jobs_that_need_a_gpu_are_skipped_without_one() -> None:
    cpu = ThisHost(gpus=0)
    at = ("shape=tiny_train_tp2", "device=cpu")
    assert skip_reason(job("variant=fsdp_dtensor", *at, "compile=true"), cpu) == "compile=true needs a CUDA GPU"
    flash = job("variant=fsdp_dtensor", *at, "attention=flash_attention_2", "dtype=bfloat16")
    assert "attention=flash_attention_2 needs" in str(skip_reason(flash, cpu))
    assert skip_reason(job("variant=fsdp_dtensor", *at, "graph=true"), cpu) == "graph=true needs a CUDA GPU"
    assert skip_reason(job("variant=fsdp_dtensor", *at, "train_loss=tpbench"), cpu) is None
    assert job("variant=fsdp_dtensor", *at, "train_loss=tpbench").uses_triton


def test_out_of_memory_names_the_expected_memory(tmp_path: Path) -> None:
    cell = job("variant=fsdp_dtensor", "shape=qwen3_32b_tp4", "device=cpu", f"output_dir={tmp_path}")
    row = store(new_task(cell, tmp_path).result("oom", "rank 0 ran out of memory"), cell, tmp_path)
    assert row["reason"].startswith("rank 0 ran out of memory; expected to need ")
    held = sum(row[f"expected_{each}_gib"] for each in ("model", "gradients", "optimizer"))
    assert held == pytest.approx(66e9 / 2**30, rel=0.01)  # 8 bytes a parameter over four ranks
    (table,) = study_document(package.load(tmp_path), "training").tables
    (line,) = (dict(zip(table.columns, each, strict=True)) for each in table.texts)
    assert (table.facts["model"], line["status"], line["expected_gib"]) == (
        "qwen3_32b",
        "oom",
        number(row["expected_gib"]),
    )
