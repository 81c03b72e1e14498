"""Check that the tutorial of CONTRIBUTING.md works: write its blocks into their files and run its command."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import environment
from tpbench.results.read import load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
UNFINISHED = """

@WORKLOAD.variant("its step returns a tensor in place of an Output")
def unfinished_tp(problem, shard):
    from tpbench.workloads.entropy_loss.inputs import Step

    return Step(lambda: shard.logits.sum())
"""
BLOCKS = re.findall(r"```(python|yaml|bash)\n(.*?)```", PAGE, flags=re.DOTALL)


def test_adding_a_variant(tmp_path):
    for name in ("tpbench", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    (implementation, name), (configuration,) = (
        [text for kind, text in BLOCKS if kind == wanted] for wanted in ("python", "yaml")
    )
    workload = tmp_path / "tpbench" / "workloads" / "entropy_loss"
    (workload / "tutorial.py").write_text(implementation)
    with (workload / "problem.py").open("a") as file:
        file.write(f"{name}{UNFINISHED}")
    (tmp_path / "conf" / "variant" / "tutorial_tp.yaml").write_text(configuration)
    unfinished = configuration.replace("tutorial_tp", "unfinished_tp")
    (tmp_path / "conf" / "variant" / "unfinished_tp.yaml").write_text(unfinished)
    (line,) = (
        line
        for kind, text in BLOCKS
        if kind == "bash"
        for line in text.splitlines()
        if line.startswith("python -m tpbench -m")
    )
    env = environment() | {"PYTHONPATH": str(tmp_path)}
    line = line.replace("variant=", "variant=unfinished_tp,")
    command = [sys.executable, *shlex.split(line)[1:], "reuse=true"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    rows = load(tmp_path / "outputs").set_index("variant")
    assert done.returncode == 1 and "1 of 3 cells failed (error: 1)" in done.stderr
    check_unfinished(str(rows.loc["unfinished_tp", "reason"]), done.stdout, tmp_path)
    assert rows.loc["tutorial_tp", "status"] == "ok" and rows.loc["tutorial_tp", "time_ms"] > 0
    losses = rows.loss_value
    assert losses["tutorial_tp"] == pytest.approx(losses["pytorch_gather"], rel=1e-3)
    for tool in (["ruff", "check", "--config", str(ROOT / "pyproject.toml")], ["ruff", "format", "--check"]):
        checked = subprocess.run(
            [sys.executable, "-m", *tool, str(workload / "tutorial.py"), str(workload / "problem.py")],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert checked.returncode == 0, checked.stdout


def check_unfinished(reason, printed, folder):
    """Check that the mistake in the unfinished variant is named with its place and its logs."""
    assert re.fullmatch(
        r"rank [01]: WrongReturn in tpbench/workloads/entropy_loss/problem\.py:\d+: the step of unfinished_tp must "
        r"return the type Output \(loss, row_loss, grad, grad_factor, entropy\), not Tensor",
        reason,
    )
    assert reason in printed
    (logs,) = re.findall(r"^ *the logs are in (\S+)$", printed, re.MULTILINE)
    assert any("Traceback" in log.read_text() for log in (folder / logs).rglob("stderr.log"))


def test_files_that_it_names_exist():
    for name in re.findall(r"`((?:tpbench|scripts|tests|\.ci|outputs)/[\w./]+)`", PAGE):
        assert (ROOT / name).exists() or name.endswith("tutorial.py"), name
