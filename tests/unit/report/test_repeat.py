"""`report.py --repeat` prints a command whose job is the stored one."""

import json
import shlex

import pytest

from tests.support.command import ROOT
from tests.support.commands import report as main
from tests.support.composed_jobs import composed
from tests.support.composed_jobs import job as composed_job
from tests.support.synthetic import cell
from tpbench.job import stored_job
from tpbench.report.repeat import row_command
from tpbench.results.read import load, plain_rows
from tpbench.results.write import write_row
from tpbench.settings import JobError

REFERENCE = ROOT / "outputs" / "reference" / "rows"
FLAT = {"workload": "entropy_loss", "variant": "triton_tp", "vocab": 32768, "tokens": 4096, "tp_size": 2}


def repeat_command(flat, environment=None):
    """Return the command of a row with this job."""
    return row_command({"job": json.dumps(flat), "environment": json.dumps(environment or {})})


def arguments(command):
    words = shlex.split(command)
    return words[words.index("tpbench") + 1 :]


def committed_jobs():
    """One row for each workload and variant."""
    rows = plain_rows(load(REFERENCE, columns=["workload", "variant", "job", "environment"]))
    kinds = {(row["workload"], row["variant"]): row for row in rows}
    return list(kinds.values())


@pytest.mark.parametrize("row", committed_jobs(), ids=lambda row: row["variant"])
def test_the_command_of_a_committed_row_has_its_key(row):
    stored, words = stored_job(json.loads(row["job"])), arguments(row_command(row))
    chosen = {word.partition("=")[0] for word in words} - {"variant", "shape", "loss", "block_cap", "model", "measure"}
    assert composed_job(*words, chosen=chosen).key == stored.key


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, "variant=triton_tp shape=v32k_tp2"),
        ({"tokens": 5000, "loss": "reverse_kl"}, "shape=v32k_tp2 loss=reverse_kl tokens=5000"),
        ({"graph": True, "output_dir": "elsewhere", "timeout_s": 5.0}, "variant=triton_tp shape=v32k_tp2 graph=true"),
    ],
)
def test_it_names_the_nearest_shape_and_what_differs(changes, said):
    assert said in repeat_command(FLAT | changes)
    assert composed_job(*arguments(repeat_command(FLAT | changes))).key == stored_job(FLAT | changes).key


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"graph": True, "signals": "kernel"}, True), ({"layers": 2, "steps": 4, "rotary": True}, False)],
)
def test_a_command_names_the_settings_of_a_block_and_not_those_that_a_stack_ignores(changes, named):
    block = {"workload": "tp_block", "variant": "block_auto", "tokens": 64, "hidden": 64, "ffn": 160, "heads": 8}
    flat = {**block, "kv_heads": 4, "head_dim": 8, "tp_size": 2, "time_budget_s": 0.25, **changes}
    command = repeat_command(flat)
    assert ("time_budget_s=0.25" in command) is named
    names = [word.partition("=")[0] for word in arguments(command)]
    again = composed_job(*arguments(command), chosen=[name for name in names if name not in ("variant", "shape")])
    assert again.key == stored_job(flat).key


def test_recorded_variables_are_quoted_and_others_left_out():
    command = repeat_command(
        FLAT,
        {"NCCL_ALGO": "a; rm -rf b", "LD_PRELOAD": "evil.so", "CUDA_VISIBLE_DEVICES": "3", "NCCL_NVLS_ENABLE": "0"},
    )
    assert command.startswith("NCCL_ALGO='a; rm -rf b' NCCL_NVLS_ENABLE=0 python -m tpbench variant=")
    with pytest.raises(JobError, match="no command line can hold the stored value of NCCL_ALGO"):
        repeat_command(FLAT, {"NCCL_ALGO": "Ring\nrm -rf b"})


def test_a_folder_is_one_argument_for_shell_and_hydra():
    (row,) = (each for each in committed_jobs() if each["variant"] == "autotp")
    folder = "it's a $(folder), \\ and \\' more\\"
    command = repeat_command(json.loads(row["job"]) | {"model_dir": folder})
    assert composed(*arguments(command))["model_dir"] == folder
    with pytest.raises(JobError, match="no command line can hold the stored value of model_dir"):
        repeat_command(json.loads(row["job"]) | {"model_dir": "a\x1b[31m"})


@pytest.mark.parametrize("job", [None, "", "[]", "{}", '{"variant": "of_another_version"}', "{" * 1000])
def test_a_row_without_a_job_of_this_version_has_no_command(job):
    with pytest.raises(JobError):
        row_command({"job": job, "environment": "{}"})


def test_the_report_prints_it(tmp_path, capsys):
    for name, variant in (("r0", "triton_tp"), ("r1", "pytorch_gather")):
        write_row(cell(variant, 32768, 2), tmp_path, name)
    (row_id,) = load(tmp_path, variant="triton_tp")["row_id"]
    assert main([str(tmp_path), "--repeat", row_id]) == 0
    assert capsys.readouterr().out.endswith("python -m tpbench variant=triton_tp shape=v32k_tp2\n")
    assert main([str(tmp_path), "--repeat", row_id[1:]]) == 2
    assert f"no row is called {row_id[1:]} (all 2: --columns row_id)" in capsys.readouterr().err


def test_a_row_of_a_user_s_file_has_a_command():
    variant = "my_loss.py:fast_tp"
    assert f"variant={variant} shape=v32k_tp2" in repeat_command(FLAT | {"variant": variant})
    with pytest.raises(JobError, match="only the command line may name a file"):
        repeat_command(FLAT | {"variant": f"/tmp/x/{variant}"})
