"""Run the scripts, and import the package, as users do: from any folder, and without torch where none is needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tpbench
from tests.support import synthetic
from tests.support.command import ROOT, environment, forked
from tests.support.launcher_rows import cell
from tpbench.launcher.attempt import Attempt

REPORT = ROOT / "scripts/report.py"

WITHOUT_TORCH = """
import sys
import tpbench
assert not {"torch", "pandas", "pyarrow"} & sys.modules.keys()
from tpbench.console import information
from tpbench.__main__ import main
heavy = {"torch", "triton", "transformers"}
*lines, sweep = sys.argv[1:]
for line in lines:
    assert information(line.split()) == 0 and not heavy & sys.modules.keys(), line
sys.argv[1:] = sweep.split()
main()
assert not heavy & sys.modules.keys()
"""


def test_reports_predictions_lists_and_plans_import_no_torch(tmp_path: Path) -> None:
    """The models of the plan are a choice of conf/model and a folder."""
    synthetic.write(synthetic.cells(), tmp_path / "out")
    (tmp_path / "folder").mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip
    (tmp_path / "folder/config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    plan = "-m variant=fsdp shape=tiny_train_dp2 model=tiny_qwen3,./folder device=cpu dry_run=true"
    line = [sys.executable, "-c", WITHOUT_TORCH, "report out", "predict --rows out", "list", "new my.py", plan]
    done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "2 cells, 2 to run" in done.stdout, done.stderr


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    synthetic.write([synthetic.cell("triton_tp", 32768, 1, gpu_name="N\u00fcvidia \u7b97")], tmp_path)
    env = {"PYTHONIOENCODING": "ascii", "PATH": ""}
    line = [sys.executable, str(REPORT), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, encoding="utf-8", env=env)
    assert done.returncode == 0 and "N\\xfcvidia" in done.stdout, done.stderr


def test_a_reader_that_stops_reading(tmp_path: Path) -> None:
    synthetic.write([synthetic.cell("triton_tp", 32768, 1)], tmp_path)
    command = f"{sys.executable} {REPORT} {tmp_path} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        ("docs columns > /dev/full", 1, "tpbench: the output cannot be written: No space left"),
        ("--version > /dev/full", 1, "tpbench: the output cannot be written: No space left"),
        ("docs columns >&-", 0, ""),
    ],
)
def test_a_full_or_closed_output_is_no_traceback(redirection: str, code: int, said: str) -> None:
    line = ["bash", "-c", f"{sys.executable} -m tpbench {redirection}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr and done.stderr.startswith(said)


def test_a_rank_imports_only_what_it_needs(tmp_path: Path) -> None:
    """Each would cost every job a third of a second or more. Most do not load under a memory limit just hit."""
    code = (
        "import os, pathlib, sys; os.environ['RANK'] = os.environ['LOCAL_RANK'] = '0'\n"
        "import tpbench.worker.start, tpbench.worker.rank\n"
        "print('torch' in sys.modules)  # a rank imports it later, without garbage collections\n"
        "import tpbench.measure.run\n"
        "from tpbench.worker.task import Task\n"
        "task = Task.load(pathlib.Path(sys.argv[1]))\n"
        "__import__(task.job.workload.bench_module)\n"
        "task.result('ok', samples_ms=[1.0, 2.0], graph=False).save(task.folder)\n"
        "heavy = {'pandas', 'pyarrow', 'scipy', 'hydra', 'sympy', 'torch.distributed.tensor', 'tpbench.launcher'}\n"
        "print(heavy & set(sys.modules))\n"
    )
    attempt = Attempt.plan(cell(3, tmp_path / "outputs"), tmp_path, {}).begin()
    attempt.task.save(attempt.task_file)
    command = [sys.executable, "-c", code, str(attempt.task_file)]
    assert subprocess.check_output(command, text=True, cwd=ROOT).split() == ["False", "set()"]
    row = attempt.close().row
    assert row is not None and row["samples_ms"] == [1.0, 2.0]
    assert tpbench.load(tmp_path).cell.tolist() == [3]


@pytest.mark.parametrize(("script", "variant"), [("run_autotp.sh", "autotp"), ("run_fsdp_dtensor.sh", "fsdp_dtensor")])
def test_scripts_that_train_one_mesh_pass_further_arguments_on(script: str, variant: str, tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / script).write_bytes((ROOT / "scripts" / script).read_bytes())
    (scripts / "environment").write_text(f"environment() {{ venv={sys.prefix}; }}\n")  # that of this test
    line = ["bash", str(scripts / script), "seq_length=64", "dry_run=true", "device=cpu"]
    sizes = {"DP_SIZE": "2", "TP_SIZE": "2", "MODEL_NAME": "tiny_qwen3", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=environment() | sizes, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{variant} model=tiny_qwen3" in done.stdout and "seq_length=64" in done.stdout
    assert "tp_size=2 dp_size=2" in done.stdout and "4 ranks" in done.stdout


def test_every_sweep_over_all_ranks_of_a_host_is_valid(tmp_path: Path) -> None:
    """Dry runs of the script's lines: the sweeps themselves need as many GPUs as ranks."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "sweep $*"\n')
    (tmp_path / "python").chmod(0o755)
    line = ["scripts/measure_ranks", str(tmp_path / "output"), "8", "dry_run=true"]
    env = {**environment(), "PYTHON": str(tmp_path / "python")}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    sweeps = [words.split()[3:] for words in done.stdout.splitlines() if words.startswith("sweep -m tpbench -m")]
    assert done.returncode == 0 and len(sweeps) == 5, done.stdout + done.stderr
    for code, folder in forked(sweeps, tmp_path):
        assert code == 0 and "Nothing was run" in (folder / "stdout").read_text(), (folder / "stderr").read_text()
    assert not (tmp_path / "output").exists()
