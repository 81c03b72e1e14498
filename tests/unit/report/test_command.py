"""`scripts/report.py` as users call it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tpbench.report.command import main

SCRIPT = Path(__file__).parents[3] / "scripts" / "report.py"

PROBE = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition('/')[0])  # as for a script
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert end.code == 0 and "torch" not in sys.modules
"""


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, encoding="utf-8", **options
    )


def test_from_anywhere_without_torch(add, tmp_path):
    add("triton_tp", 0.2274)
    (tmp_path / "rows").rename(tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROBE, SCRIPT, "out"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "0.227 ms (1.00x)" in done.stdout


def test_importing_the_package_is_cheap():
    probe = "import sys, tpbench; assert not {'torch', 'pandas', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", probe], cwd=SCRIPT.parents[1], check=True)


def test_output_and_filters(add, tmp_path, capsys):
    add("triton_tp", 1.0)
    add("pytorch_gather", 2.0, loss="forward_kl")
    out = tmp_path / "table.md"
    arguments = [str(tmp_path), "--loss", "forward_kl", "--format", "markdown"]
    assert main([*arguments, "-o", str(out)]) == 0
    assert "pytorch_gather" in out.read_text() and "triton_tp" not in out.read_text()
    assert capsys.readouterr().out == ""
    assert main([*arguments, "--variant", "pytorch_gather,triton_tp"]) == 0
    assert capsys.readouterr().out == out.read_text()
    assert main([*arguments, "--variant", "triton_tp"]) == 2
    assert "in these rows, no loss is called forward_kl (valid: cross_entropy)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nowhere"], "no such folder or file: nowhere: run `python -m tpbench ...` first"),
        (["empty"], "no rows in empty: run `python -m tpbench ...` first"),
        (["rows", "--metric", "time"], "no metric is called time, did you mean"),
        (["rows", "--loss", "cros_entropy"], "did you mean cross_entropy?"),
        (["rows", "-o", "no/such/folder"], "No such file or directory"),
    ],
)
def test_wrong_requests_are_explained(add, tmp_path, monkeypatch, capsys, arguments, said):
    add("triton_tp", 1.0)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.out == "" and len(printed.err.splitlines()) == 1


def test_broken_files_and_disagreement_are_told(add, tmp_path, capsys):
    add("triton_tp", 1.0)
    add("pytorch_gather", 1.0, loss_value=99.0)
    (tmp_path / "bad.parquet").write_text("bad")
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "bad.parquet: passed over" in printed.err
    assert "different losses" in printed.err and "different losses" in printed.out


def test_a_reader_that_leaves_and_a_terminal_without_unicode(add, tmp_path):
    add("triton_tp", 1.0, gpu_name="N\u00fcvidia \u7b97")
    done = run(tmp_path, env={"PYTHONIOENCODING": "ascii", "PATH": ""})
    assert done.returncode == 0 and "N\\xfcvidia" in done.stdout, done.stderr
    command = f"{sys.executable} {SCRIPT} {tmp_path} | true; exit ${{PIPESTATUS[0]}}"
    left = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (left.returncode, left.stderr) == (0, "")
