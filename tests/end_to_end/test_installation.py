"""Installation is quiet, and commands in a Python without the packages say how to install them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import ROOT, tpbench

PYTHON_STUB = """#!/usr/bin/env bash
# Stands for Python. As `-m venv DIR` it copies itself, and as `-m pip` it prints as much as pip does.
case "$1 ${2:-}" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip")
    echo "arguments: $*"; echo "Collecting torch"; echo "WARNING: noise" >&2; /bin/sleep "${PIP_SECONDS:-0}"
    echo "ERROR: the last line"
    exit "${PIP_EXIT_CODE:-0}" ;;
"-m tpbench") echo "started: $*" ;;
esac
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout that has no .venv."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("scripts", "tpbench", "conf"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy2(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python in whose environment nothing is installed."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


@pytest.mark.parametrize("arguments", [["-m", "tpbench"], ["scripts/report.py", "outputs"]], ids=" ".join)
def test_without_packages_a_command_says_in_one_line_how_to_install_them(
    arguments: list[str], checkout: Path, bare_python: Path
) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    line = [str(bare_python), *arguments]
    done = subprocess.run(line, cwd=checkout, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line_of_error,) = done.stderr.splitlines()
    assert line_of_error.endswith(f": {bare_python} -m pip install -e '{checkout}[bench]'")
    assert "hydra" in line_of_error and "torch" in line_of_error


def test_without_torch_a_job_is_refused_before_its_ranks_start(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['torch'] = None; from tpbench.__main__ import main; main()"
    job = ("variant=pytorch_gather", "measure=quick", "device=cpu")
    done = tpbench(*job, cwd=tmp_path, program=("-c", hidden))
    assert done.returncode == 2
    assert done.stderr.startswith("tpbench: the benchmark needs torch (not installed): ")
    assert "Traceback" not in done.stderr
    assert not [*tmp_path.rglob("*.parquet"), *tmp_path.rglob("task.json")]


def scripts_run(checkout: Path, tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the checkout's scripts/run with a program in place of Python."""
    stub = tmp_path / "python3.13"
    stub.write_text(PYTHON_STUB)
    stub.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    return subprocess.run([str(checkout / "scripts/run"), *arguments], env=env, capture_output=True, text=True)


def test_an_installation_prints_one_line_and_writes_a_log(checkout: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkout / ".venv", ignore_errors=True)
    failed = scripts_run(checkout, tmp_path, "list", PIP_EXIT_CODE="1")
    log = checkout / ".venv" / "install.log"
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "ERROR: the last line" in failed.stderr and str(log) in failed.stderr

    (tmp_path / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.2\n")  # in place of the 15 s between two lines
    (tmp_path / "sleep").chmod(0o755)
    done = scripts_run(checkout, tmp_path, "list", PIP_SECONDS="1")
    line, *steps = done.stderr.splitlines()
    assert any(step.endswith(" s: Collecting torch") for step in steps)
    assert str(checkout / ".venv") in line and "some minutes, once" in line
    assert (done.returncode, done.stdout) == (0, "started: -m tpbench list\n")
    assert "WARNING: noise" in log.read_text() and f"--editable {checkout}[report]" in log.read_text()

    again = scripts_run(checkout, tmp_path, "list")
    assert (again.returncode, again.stderr) == (0, "")
    shutil.rmtree(checkout / ".venv")


@pytest.mark.parametrize(("gpus", "shape"), [(None, None), (0, None), (1, "v131k_tp1"), (2, "v131k_tp2")])
def test_the_first_run_ends_with_the_next_commands(
    gpus: int | None, shape: str | None, checkout: Path, tmp_path: Path
) -> None:
    """Without GPUs `nvidia-smi` is missing, or it fails."""
    if gpus is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nseq {gpus}\n[ {gpus} -gt 0 ]\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    done = scripts_run(checkout, tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("started: -m tpbench -m variant=triton_tp")
    assert ("There is no GPU" in done.stdout) == (not gpus)
    assert "Continue with:" in done.stdout and (not shape or f"shape={shape}" in done.stdout)
