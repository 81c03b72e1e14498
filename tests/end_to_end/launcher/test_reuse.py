"""Warm groups: one torchrun for many jobs, none of which can tell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tpbench as package
from tests.support.command import ROOT, Running, environment, gone, tpbench

SMALL = ("tokens=64", "vocab=2048", "tp_size=2", "dtype=float32", "device=cpu", "measure=quick", "min_iterations=3",
         "max_iterations=3")  # fmt: skip
SAME = ["loss_value", "loss_error", "grad_error", "loss_identical", "iterations", "warmed_up", "bytes_moved",
        "bytes_communicated", "memory_limit_gib", "environment", "key", "job", "status"]  # fmt: skip


def test_the_twentieth_warm_job_makes_the_row_that_a_fresh_one_makes(tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir()
    cold = tpbench("variant=pytorch_gather", "seed=5", *SMALL, "memory_limit_gib=2", cwd=tmp_path / "cold")
    (tmp_path / "warm").mkdir()
    # Before the last one: other seeds, another variant, a limit on memory that must not stay.
    warm = tpbench("-m", "memory_limit_gib=0.5,2", "seed=1,2,3,4,5", "variant=pytorch_tp_manual,pytorch_gather", *SMALL,
                   "reuse=true", cwd=tmp_path / "warm")  # fmt: skip
    assert (cold.returncode, warm.returncode) == (0, 0), warm.stderr
    rows = package.load(tmp_path / "warm/outputs").sort_values("cell")
    assert len(rows) == 20
    assert list(rows["warm"]) == [False] + [True] * 19
    fresh = package.load(tmp_path / "cold/outputs").iloc[0]
    last = rows.iloc[-1]
    assert (last["variant"], last["seed"]) == ("pytorch_gather", 5)
    assert last[SAME].to_dict() == fresh[SAME].to_dict()
    assert last["peak_gib"] == pytest.approx(fresh["peak_gib"], abs=8 / 1024)
    assert len(list((tmp_path / "warm/outputs/sweeps").glob("*/group-*"))) == 1


STAYING = "import tpbench.launcher.warm as w; w.reusable = lambda job: True; from tpbench.__main__ import main; main()"
"""As on GPUs: the processes themselves stay, where they are left clean."""


def test_processes_that_stay_make_the_rows_of_fresh_ones(tmp_path: Path) -> None:
    sweep = ("variant=pytorch_tp_manual,pytorch_gather", "seed=4,5", "reuse=true")
    rows = {}
    for name, line in (("fresh", ("variant=pytorch_gather", "seed=5")), ("stay", sweep)):
        (tmp_path / name).mkdir()
        done = tpbench("-m", *line, *SMALL, "memory_limit_gib=2", cwd=tmp_path / name, program=("-c", STAYING))
        assert done.returncode == 0, done.stderr
        rows[name] = package.load(tmp_path / name / "outputs").sort_values("cell")
    assert list(rows["fresh"]["jobs_before"]) == [0]
    assert list(rows["stay"]["jobs_before"]) == [0, 1, 2, 3]
    assert rows["stay"].iloc[-1][SAME].to_dict() == rows["fresh"].iloc[0][SAME].to_dict()


def test_who_stays_makes_room_for_other_groups(tmp_path: Path) -> None:
    """On two cores: on more both cells of two ranks would run at once."""
    two = f"import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]); {STAYING}"
    small = [each for each in SMALL if not each.startswith("tp_size")]
    sweep = ("-m", "variant=pytorch_gather", *small, "reuse=true", "parallel=auto", "tp_size=2,1", "seed=1,2")
    done = tpbench(*sweep, cwd=tmp_path, program=("-c", two))
    assert done.returncode == 0, done.stderr
    rows = package.load(tmp_path / "outputs").sort_values("cell")
    assert set(rows["status"]) == {"ok"}
    assert list(rows.loc[rows["tp_size"] == 2, "jobs_before"]) == [0, 1]


def test_who_has_compiled_does_not_stay(tmp_path: Path) -> None:
    sweep = ("-m", "variant=pytorch_tp_manual", "compile=true", *SMALL, "tp_size=1", "reuse=true", "seed=1,2")
    done = tpbench(*sweep, cwd=tmp_path, program=("-c", STAYING))
    assert done.returncode == 0, done.stderr
    assert list(package.load(tmp_path / "outputs")["jobs_before"]) == [0, 0]


SWITCHING = """
import sys
def hook(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("/result.json"):
        sys.modules["torch"].backends.cudnn.benchmark = True
sys.addaudithook(hook)
"""
"""A rank that saves its result changes a setting of torch."""


def test_a_process_with_a_changed_setting_is_not_reused_and_says_which(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SWITCHING)
    line = [sys.executable, "-c", STAYING, "-m", "variant=pytorch_gather", *SMALL, "reuse=true", "seed=1,2"]
    env = {**environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(package.load(tmp_path / "outputs")["jobs_before"]) == [0, 0]
    (log,) = tmp_path.glob("outputs/sweeps/*/0/warm/attempt_0/0/stderr.log")
    assert "this process ends: the job changed torch.backends.cudnn.benchmark\n" in log.read_text()


def test_a_fault_ends_the_group_and_the_next_job_gets_a_new_one(tmp_path: Path) -> None:
    sweep = ("-m", "variant=pytorch_tp_manual", *SMALL[:-2], "min_iterations=3,1000000,4", "max_iterations=1000000")
    running = Running(*sweep, "reuse=true", cwd=tmp_path)  # the second of these cells does not end by itself
    rank = running.wait_for("setting up", rank=1, cell=1)
    family = running.family()
    rank.kill()
    code, output = running.end()
    assert code == 1, output
    rows = package.load(tmp_path / "outputs").sort_values("cell")
    assert list(rows["status"]) == ["ok", "error", "ok"]
    assert list(rows["warm"]) == [False, True, False]
    assert "rank 1 ended with signal 9 (SIGKILL)" in rows["reason"].iloc[1]
    assert gone(family)


def test_killed_with_its_groups_a_sweep_leaves_nothing(tmp_path: Path) -> None:
    endless = (*SMALL[:-2], "min_iterations=1000000", "max_iterations=1000000")
    running = Running("-m", "variant=pytorch_tp_manual", "seed=1,2", *endless, "reuse=true", cwd=tmp_path)
    running.wait_for("setting up", rank=0)
    family = running.family()
    running.process.kill()
    running.end()
    assert len(family) >= 3
    assert gone(family, within_s=45)


def test_a_removed_output_folder_ends_a_warm_sweep_in_one_line(tmp_path: Path) -> None:
    endless = (*SMALL[:-2], "min_iterations=1000000", "max_iterations=1000000")
    running = Running("-m", "variant=pytorch_tp_manual", "seed=1,2", *endless, "reuse=true", cwd=tmp_path)
    running.wait_for("setting up", rank=0)
    family = running.family()
    while (tmp_path / "outputs").exists():  # a rank may write a log meanwhile
        shutil.rmtree(tmp_path / "outputs", ignore_errors=True)
    code, output = running.end()
    (line,) = [each for each in output.splitlines() if each.startswith("tpbench:")]
    assert code == 1 and "was removed while its job ran" in line
    assert "Traceback" not in output
    assert gone(family)
