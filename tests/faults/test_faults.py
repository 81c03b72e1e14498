"""A sweep under fire. After every fault: nothing lost, no process and no lock left behind, one finished row a cell."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import psutil
import pytest

import tpbench as package
from tests.command import ROOT, Running, gone, tpbench
from tests.launcher.rows import FACTS, cell
from tpbench.cell import CellRow
from tpbench.launcher.resume import FINISHED, verdicts

SMALL = ("variant=pytorch_tp_manual", "tokens=16", "vocab=64", "tp_size=2", "measure=quick", "min_iterations=3",
         "max_iterations=3", "device=cpu")  # fmt: skip
SLOW = ("variant=triton_tp", "tokens=2048", "vocab=16384", "tp_size=2", "measure=quick", "device=cpu")
"""Some ten seconds in the interpreter."""


def finished(outputs: Path) -> pd.DataFrame:
    rows = package.load(outputs)
    return rows[rows["status"].isin(FINISHED)]


def nothing_locked(outputs: Path) -> bool:
    """Whether no living process claims a cell."""
    with (outputs / "rows" / ".claims").open("r+") as claims:
        try:
            fcntl.lockf(claims, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


FAULTS = ("kill -9 of a rank", "kill -9 of torchrun", "kill -9 of the launcher", "kill -9 of everything",
          "SIGTERM of the launcher", "SIGINT of the launcher")  # fmt: skip


def do(fault: str, running: Running, chance: random.Random) -> bool:
    """Whether there was somebody to do it to."""
    family = running.family()
    launcher = psutil.Process(running.process.pid)
    if fault == "kill -9 of everything":
        victims = [launcher, *family]
        chance.shuffle(victims)
    elif fault.endswith("launcher"):
        victims = [launcher]
    else:
        module = "tpbench.worker" if fault.endswith("rank") else "torch.distributed.run"
        victims = []
        for each in family:
            with contextlib.suppress(psutil.Error):
                line = each.cmdline()
                # torchrun's line names the worker's module too, after its own.
                if next((part for part in line if part in ("tpbench.worker", "torch.distributed.run")), "") == module:
                    victims.append(each)
        victims = chance.sample(victims, min(1, len(victims)))
    number = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}.get(fault.partition(" ")[0], signal.SIGKILL)
    for each in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)
    return bool(victims)


ENOUGH = 2
"""Times that each fault is to strike; a moment that comes too late is tried again."""
TRIES = 5


def test_at_random_moments(tmp_path: Path, tried: Counter[str]) -> None:
    chance = random.Random(20)
    outputs = tmp_path / "outputs"
    kept = seeds = 0
    for fault in FAULTS * ENOUGH:
        for _ in range(TRIES):
            seeds += 2  # whatever is left of the last round, there is work in this one
            running = Running("-m", *SMALL, f"seed={','.join(map(str, range(seeds)))}", "resume=true", cwd=tmp_path)
            running.wait_for_workers()
            time.sleep(chance.uniform(0, 2))
            family, struck = [], False
            if running.process.poll() is None:
                family = running.family()
                struck = do(fault, running, chance)
            code, output = running.end()
            assert "Traceback" not in output, (fault, output)
            assert gone(family, within_s=45), fault
            assert nothing_locked(outputs)
            rows = finished(outputs)
            # Who works on the kernels while this runs makes cells stale: that is no second row of one.
            assert not rows[["key", "kernels_version"]].duplicated().any(), output
            assert len(rows) >= kept
            kept = len(rows)
            if struck and fault in ("SIGTERM of the launcher", "SIGINT of the launcher"):
                assert code != 0 and "Interrupted: " in output, (fault, output)
            if struck:
                tried[fault] += 1
                break
    assert {fault: tried[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, ENOUGH)
    sweep = ("-m", *SMALL, f"seed={','.join(map(str, range(seeds)))}", "resume=true", "reuse=true")
    done = tpbench(*sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(finished(outputs)["seed"]) == set(range(seeds))


def test_nobody_outlives_a_launcher_that_is_killed(tmp_path: Path, tried: Counter[str]) -> None:
    """In a job that would go on for minutes."""
    running = Running(*SLOW, "tokens=65536", cwd=tmp_path)
    running.wait_for("first pass", rank=1)
    family = running.family()
    assert len(running.workers()) == 2
    running.process.kill()
    running.end()
    assert gone(family, within_s=15)
    tried["kill -9 of the launcher of a long job"] += 1


SPIN = """
import os, signal
def spin(*_):
    while True:
        pass
if os.environ.get("RANK") == "1":
    signal.signal(signal.SIGALRM, spin)
    signal.setitimer(signal.ITIMER_REAL, 6)
"""


def test_a_rank_that_spins(tmp_path: Path, tried: Counter[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPIN)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    running = Running(*SLOW, "timeout_s=14", cwd=tmp_path, env=env)
    running.wait_for("first pass", rank=1)
    family = running.family()
    code, output = running.end()
    assert code == 1, output
    (row,) = package.load(tmp_path / "outputs").to_dict("records")
    assert row["status"] == "timeout"
    assert gone(family)
    tried["a rank that spins"] += 1


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("a disk of the test's own needs the right to mount one")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_outputs_that_become_read_only_lose_no_measurement(tmp_path: Path, disk: Path, tried: Counter[str]) -> None:
    (disk / "outputs").mkdir()
    (tmp_path / "outputs").symlink_to(disk / "outputs")
    running = Running(*SLOW, cwd=tmp_path)
    running.wait_for("first pass", rank=0)
    for each in disk.glob("outputs/sweeps/*/0"):  # what is open for writing forbids it: freeze the rows alone
        assert each.is_dir()
    rows = disk / "outputs" / "rows"
    subprocess.run(["mount", "--bind", str(rows), str(rows)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(rows)], check=True)
    try:
        code, output = running.end()
    finally:
        subprocess.run(["umount", "-l", str(rows)], check=True)
    assert code != 0
    assert "takes no more rows; the row just measured is in " in output
    rescued = Path(output.split("the row just measured is in ")[1].split()[0])
    assert package.load(rescued)["status"].item() == "ok"
    rescued.unlink()
    tried["outputs become read-only"] += 1


def test_a_clock_that_steps_back(tmp_path: Path, tried: Counter[str]) -> None:
    one = cell(0, tmp_path)
    later = datetime.now(UTC) + timedelta(hours=1)
    ahead = CellRow.begin(one.job, **FACTS)
    ahead.known["started_at"] = later.isoformat()
    ahead.write("error", "it broke")  # written before the clock was set back
    CellRow.begin(one.job, **FACTS).write("ok")
    rows = package.load(tmp_path)
    assert (rows["wall_s"] >= 0).all()
    assert verdicts([one], FACTS)[0].why == "measured before"
    tried["the clock steps back"] += 1


def test_two_launchers_in_one_folder_of_which_one_dies(tmp_path: Path, tried: Counter[str]) -> None:
    sweep = ("-m", *SMALL, "seed=1,2", "resume=true")
    both = [Running(*sweep, cwd=tmp_path) for _ in range(2)]
    time.sleep(4)
    both[0].process.kill()
    ends = [each.end() for each in both]
    assert ends[1][0] == 0, ends[1]
    rows = finished(tmp_path / "outputs")
    assert sorted(json.loads(job)["seed"] for job in rows["job"]) == [1, 2]
    tried["two launchers, one killed"] += 1
