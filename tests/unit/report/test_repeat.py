"""`report.py --repeat` prints a command whose job is the stored one."""

import json
import shlex

import pandas as pd
import pytest

from tests.support.commands import report as main
from tests.support.synthetic import cell
from tpbench.report.command import row_command
from tpbench.results.read import load
from tpbench.results.write import write_row
from tpbench.settings import JobError


def repeat_command(**columns):
    """Return the command of a row with these columns."""
    return row_command(pd.DataFrame([{"row_id": "r", "environment": None} | columns]), "r")


def arguments(command):
    words = shlex.split(command)
    return words[words.index("tpbench") + 1 :]


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


def test_a_row_of_an_older_version_has_no_command():
    with pytest.raises(JobError, match="row r doesn't have its command line"):
        repeat_command(overrides=None)


def test_the_report_prints_it(tmp_path, capsys):
    write_row(cell("triton_tp", 32768, 2, overrides="variant=triton_tp shape=v32k_tp2"), tmp_path, "r0")
    (row_id,) = load(tmp_path)["row_id"]
    assert main([str(tmp_path), "--repeat", row_id]) == 0
    assert capsys.readouterr().out.endswith("python -m tpbench variant=triton_tp shape=v32k_tp2\n")
    assert main([str(tmp_path), "--repeat", row_id[1:]]) == 2
    assert f"no row is called {row_id[1:]}" in capsys.readouterr().err
