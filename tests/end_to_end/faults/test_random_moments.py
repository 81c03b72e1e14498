"""A sweep under fire. After every fault: nothing lost, no process and no lock left behind, one finished row a cell."""

from __future__ import annotations

import contextlib
import fcntl
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pandas as pd
import psutil
import pytest

import tpbench as package
from tests.support.command import Running, gone, tpbench
from tests.support.fault_catalogue import AT_RANDOM_MOMENTS, ENDLESS, SMALL
from tpbench.results.cells import MEASURED


def finished(outputs: Path) -> pd.DataFrame:
    rows = package.load(outputs)
    return rows[rows["status"].isin(MEASURED)]


def nothing_locked(outputs: Path) -> bool:
    """Return True if no living process holds the lock of a cell."""
    with (outputs / "rows" / ".claims").open("r+") as claims:
        try:
            fcntl.lockf(claims, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def do(fault: str, running: Running, chance: random.Random) -> bool:
    """Cause the fault. Return False if no process was left to cause it to."""
    family = running.family()
    launcher = psutil.Process(running.process.pid)
    if fault == "kill -9 of everything":
        victims = [launcher, *family]
        chance.shuffle(victims)
    elif fault.endswith("launcher"):
        victims = [launcher]
    else:
        module = "tpbench.worker.rank" if fault.endswith("rank") else "tpbench.worker.torchrun"
        victims = []
        for each in family:
            with contextlib.suppress(psutil.Error):
                line = each.cmdline()
                # torchrun's line names the worker's module too, after its own.
                if (
                    next((part for part in line if part in ("tpbench.worker.rank", "tpbench.worker.torchrun")), "")
                    == module
                ):
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


@pytest.mark.fault(*AT_RANDOM_MOMENTS)
@pytest.mark.timeout(900)  # more than a dozen sweeps
def test_at_random_moments(tmp_path: Path) -> None:
    tried = Counter[str]()
    chance = random.Random(20)
    outputs = tmp_path / "outputs"
    kept = seeds = 0
    # Faults that a sweep survives come first. Cells that the others leave undone remain for the sweep at the end.
    for fault in sorted(AT_RANDOM_MOMENTS * ENOUGH, key=AT_RANDOM_MOMENTS.index):
        for _ in range(TRIES):
            seeds += 1  # a new seed: each round has a cell to run, even if the last round finished all of its cells
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
            # A change to the kernels during this test makes cells stale. Rows of two kernel versions are no duplicates.
            assert not rows[["key", "kernels_version"]].duplicated().any(), output
            assert len(rows) >= kept
            kept = len(rows)
            if struck and fault in ("SIGTERM of the launcher", "SIGINT of the launcher"):
                assert code != 0 and "Interrupted: " in output and "++" not in output, (fault, output)
            if struck:
                tried[fault] += 1
                break
    assert tried == dict.fromkeys(AT_RANDOM_MOMENTS, ENOUGH)
    sweep = ("-m", *SMALL, f"seed={','.join(map(str, range(seeds)))}", "resume=true", "reuse=true")
    done = tpbench(*sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(finished(outputs)["seed"]) == set(range(seeds))
    rows = package.load(outputs)  # failures too: none is left of a cell that was finished after it
    assert not rows[["key", "kernels_version"]].duplicated().any()


@pytest.mark.fault("kill -9 of the launcher of a long job")
def test_nobody_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    running = Running(*ENDLESS, cwd=tmp_path)
    running.wait_for("first pass", rank=1)
    family = running.family()
    assert len(running.workers()) == 2
    running.process.kill()
    running.end()
    assert gone(family, within_s=15)
