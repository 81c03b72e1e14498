"""A reused torchrun gives each job the same row as a new one."""

import shutil
from pathlib import Path

import pytest

import tpbench as package
from tests.support.command import Running, gone, tpbench
from tests.support.disturbed_sweeps import WITHOUT_END

PROBLEM = ("tokens=64", "vocab=2048", "tp_size=2", "dtype=float32", "device=cpu")
SMALL = (*PROBLEM, "time_budget_s=60", "max_iterations=3")
"""A job of three iterations on a machine of any load. The time budget of measure=quick may allow only one."""
SAME = ["loss_value", "loss_error", "grad_error", "loss_identical", "iterations", "warmed_up", "bytes_moved",
        "bytes_communicated", "environment", "key", "job", "status"]  # fmt: skip


def test_a_warm_job_makes_the_row_that_a_fresh_one_makes(tmp_path: Path) -> None:
    """Before it are another size and variant. Cells with as many ranks share processes, and run first."""
    (tmp_path / "cold").mkdir()
    cold = tpbench("variant=pytorch_gather", *SMALL, cwd=tmp_path / "cold")
    assert cold.returncode == 0, cold.stderr
    sizes = [word for word in SMALL if not word.startswith(("tokens", "tp_size"))]
    warm = tpbench("-m", "tokens=128,64", "variant=pytorch_tp_manual,pytorch_gather", "tp_size=1,2", *sizes,
                   "reuse=true", cwd=tmp_path)  # fmt: skip
    assert warm.returncode == 0, warm.stderr
    (fresh,) = (row for _, row in package.load(tmp_path / "cold/outputs").iterrows())
    rows = package.load(tmp_path / "outputs").sort_values("cell")
    assert list(rows["warm"]) == [False] * 2 + [True] * 6
    assert list(rows["jobs_before"]) == [0, 0, 1, 1, 2, 2, 3, 3]
    last = rows.iloc[-1]
    assert last[SAME].to_dict() == fresh[SAME].to_dict()
    assert last["peak_gib"] == pytest.approx(fresh["peak_gib"], abs=8 / 1024)
    assert len(list((tmp_path / "outputs/sweeps").glob("*/group-*"))) == 2


def test_a_fault_ends_the_group_and_the_next_job_gets_a_new_one(tmp_path: Path) -> None:
    """A removed output folder ends the whole sweep, in one line."""
    endless = "max_iterations=3,1000000,4,1000001"  # the second and the last of these cells do not end by themselves
    running = Running(
        "-m", "variant=pytorch_tp_manual", *PROBLEM, *WITHOUT_END[:-1], endless, "reuse=true", cwd=tmp_path
    )
    rank = running.wait_for("setting up", rank=1, cell=1)
    family = running.family()
    rank.kill()
    running.wait_for("setting up", rank=1, cell=3)
    assert gone(family)
    rows = package.load(tmp_path / "outputs").sort_values("cell")
    assert list(rows["status"]) == ["ok", "error", "ok"]
    assert list(rows["warm"]) == [False, True, False]
    assert "rank 1 ended with signal 9 (SIGKILL)" in rows["reason"].iloc[1]
    family = running.family()
    while (tmp_path / "outputs").exists():  # a rank may write a log meanwhile
        shutil.rmtree(tmp_path / "outputs", ignore_errors=True)
    code, output = running.end()
    (line,) = [each for each in output.splitlines() if each.startswith("tpbench:")]
    assert code == 1 and "was removed while its job ran" in line
    assert "Traceback" not in output
    assert gone(family)
