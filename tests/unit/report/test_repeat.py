"""`report.py --repeat` prints a command whose job is the stored one."""

import json
import shlex

import pandas as pd
import pytest

from tests.support.command import ROOT
from tests.support.commands import report as main
from tests.support.composed_jobs import job as composed_job
from tests.support.synthetic import cell
from tpbench.job import stored_job
from tpbench.report.repeat import row_command
from tpbench.results.read import load
from tpbench.results.write import write_row
from tpbench.settings import JobError

FLAT = {"workload": "entropy_loss", "variant": "triton_tp", "vocab": 32768, "tokens": 4096, "tp_size": 2}
ROWS = load(ROOT / "outputs/reference/rows", columns=["row_id", "workload", "variant", "job", "environment"])


def repeat_command(**columns):
    """Return the command of a row with these columns."""
    return row_command(pd.DataFrame([{"row_id": "r", "job": None, "environment": None} | columns]), "r")


def arguments(command):
    words = shlex.split(command)
    return words[words.index("tpbench") + 1 :]


@pytest.mark.parametrize("row_id", ROWS.groupby("workload")["row_id"].first())
def test_the_command_of_a_row_without_overrides_has_its_key(row_id):
    words = arguments(row_command(ROWS, row_id))
    chosen = {word.partition("=")[0] for word in words} - {"variant", "shape", "loss", "block_cap", "model", "measure"}
    (job,) = ROWS["job"][ROWS["row_id"] == row_id]
    assert composed_job(*words, chosen=chosen).key == stored_job(json.loads(job)).key


def test_overrides_are_repeated_as_they_were_typed():
    folder = "it's a $(folder), \\ and more"
    overrides = shlex.join(["variant=my_loss.py:fast_tp", "shape=v32k_tp2", f"output_dir='{folder}'"])
    assert arguments(repeat_command(overrides=overrides)) == shlex.split(overrides)
    with pytest.raises(JobError, match="no command line can hold"):
        repeat_command(overrides="variant=a\x1b[31m")


def test_recorded_variables_are_quoted_and_others_left_out():
    recorded = {
        "NCCL_ALGO": "a; rm -rf b",
        "LD_PRELOAD": "evil.so",
        "CUDA_VISIBLE_DEVICES": "3",
        "NCCL_NVLS_ENABLE": "0",
    }
    command = repeat_command(overrides="variant=a", environment=json.dumps(recorded))
    assert command == "NCCL_ALGO='a; rm -rf b' NCCL_NVLS_ENABLE=0 python -m tpbench variant=a"
    with pytest.raises(JobError, match="no command line can hold the stored value of NCCL_ALGO"):
        repeat_command(overrides="variant=a", environment='{"NCCL_ALGO": "Ring\\nrm -rf b"}')


@pytest.mark.parametrize("job", [
    None, "", "[]", "{}", '{"variant": "of_another_version"}', "{" * 1000,
    json.dumps(FLAT | {"variant": "my_loss.py:fast_tp"}), json.dumps(FLAT | {"block_cap": 7}),
])  # fmt: skip
def test_a_row_that_does_not_say_how_it_was_measured_has_no_command(job):
    with pytest.raises(JobError):
        repeat_command(job=job)


def test_the_report_prints_it(tmp_path, capsys):
    write_row(cell("triton_tp", 32768, 2, overrides="variant=triton_tp shape=v32k_tp2"), tmp_path, "r0")
    (row_id,) = load(tmp_path)["row_id"]
    assert main([str(tmp_path), "--repeat", row_id]) == 0
    assert capsys.readouterr().out.endswith("python -m tpbench variant=triton_tp shape=v32k_tp2\n")
    assert main([str(tmp_path), "--repeat", row_id[1:]]) == 2
    assert f"no row is called {row_id[1:]}" in capsys.readouterr().err
