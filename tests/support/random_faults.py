"""Disturb a sweep at a random moment, and check what is left: no row lost or doubled, no process, no lock."""

from __future__ import annotations

import contextlib
import fcntl
import random
import signal
import time
from pathlib import Path

import pandas as pd
import psutil

import tpbench as package
from tests.support.command import Running, gone
from tests.support.fault_catalogue import SMALL
from tpbench.results.current_rows import MEASURED

_PROGRAMS = ("tpbench.worker.rank", "tpbench.worker.torchrun")


def finished(outputs: Path) -> pd.DataFrame:
    """Return the rows of cells that ran to their end."""
    rows = package.load(outputs)
    return rows[rows["status"].isin(MEASURED)]


def disturbed_sweep(fault: str, folder: Path, seeds: int, chance: random.Random) -> bool:
    """Resume a sweep of that many seeds in a folder, and disturb it. Return False if the fault came too late.

    `fault`: one of AT_RANDOM_MOMENTS. Raises AssertionError if something is lost, doubled or left behind.
    """
    outputs = folder / "outputs"
    kept = len(finished(outputs)) if outputs.exists() else 0
    running = Running("-m", *SMALL, f"seed={','.join(map(str, range(seeds)))}", "resume=true", cwd=folder)
    running.wait_for_workers()
    time.sleep(chance.uniform(0, 2))
    family, struck = [], False
    if running.process.poll() is None:
        family = running.family()
        struck = _cause(fault, running, chance)
    code, output = running.end()
    assert "Traceback" not in output, (fault, output)
    assert gone(family), fault
    assert _nothing_locked(outputs), fault
    rows = finished(outputs)
    # A change to the kernels during this test makes cells stale. Rows of two kernel versions are no duplicates.
    assert not rows[["key", "kernels_version"]].duplicated().any(), output
    assert len(rows) >= kept, output
    if fault in ("SIGTERM of the launcher", "SIGINT of the launcher"):
        struck &= code != 0  # the signal may come when the sweep has ended
        assert not struck or ("Interrupted: " in output and "++" not in output), (fault, output)
    return struck


def _nothing_locked(outputs: Path) -> bool:
    """Return True if no living process holds the lock of a cell."""
    with (outputs / "rows" / ".claims").open("r+") as claims:
        try:
            fcntl.lockf(claims, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _cause(fault: str, running: Running, chance: random.Random) -> bool:
    """Cause the fault. Return False if no process was left to cause it to."""
    family = running.family()
    launcher = psutil.Process(running.process.pid)
    if fault == "kill -9 of everything":
        victims = [launcher, *family]
        chance.shuffle(victims)
    elif fault.endswith("launcher"):
        victims = [launcher]
    else:
        victims = [each for each in family if _program(each) == f"tpbench.worker.{fault.rpartition(' ')[2]}"]
        victims = chance.sample(victims, min(1, len(victims)))
    number = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}.get(fault.partition(" ")[0], signal.SIGKILL)
    for each in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)
    return bool(victims)


def _program(process: psutil.Process) -> str:
    """Return the module that a process runs. torchrun's line names the worker's module too, after its own."""
    with contextlib.suppress(psutil.Error):
        return next((part for part in process.cmdline() if part in _PROGRAMS), "")
    return ""
