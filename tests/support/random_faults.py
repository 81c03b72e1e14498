"""Disturb a sweep at a random moment, and check what is left: no row lost or doubled, no process, no lock."""

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
from tests.support.disturbed_sweeps import SMALL
from tpbench.results.current_rows import MEASURED

SIGNALS = {
    "SIGTERM of the launcher": signal.SIGTERM,
    "SIGINT of the launcher": signal.SIGINT,
    "SIGHUP of the launcher": signal.SIGHUP,
}
"""Faults that a sweep answers by its end."""

END_S = 200
"""Time after which a sweep that got a signal counts as hanging. Alone, it ends within 20 s."""

MODES = {
    "cold": (),
    "warm": ("reuse=true",),
    "interleaved": ("reuse=true", "order=interleaved", "variant=pytorch_tp_manual,pytorch_gather"),
}
"""Options of a sweep by the way in which it runs its cells."""

_PROGRAMS = ("tpbench.worker.rank", "tpbench.worker.torchrun")


def finished(outputs: Path) -> pd.DataFrame:
    """Return the rows of cells that ran to their end."""
    if not outputs.exists():
        return pd.DataFrame()
    rows = package.load(outputs)
    return rows[rows["status"].isin(MEASURED)]


def disturbed_sweep(fault: str, mode: str, folder: Path, seeds: int, chance: random.Random) -> bool:
    """Resume a sweep of that many seeds in a folder, and disturb it. Return False if the fault came too late.

    `fault`: one of AT_RANDOM_MOMENTS. `mode`: one of MODES. Raises AssertionError if something is lost, doubled or left
    behind, and if a signal does not end the sweep within END_S.
    """
    outputs = folder / "outputs"
    kept = len(finished(outputs))
    options = {option.partition("=")[0]: option for option in (*SMALL, *MODES[mode])}.values()
    sweep = (*options, f"seed={','.join(map(str, range(seeds)))}", "resume=true")
    running = Running("-m", *sweep, cwd=folder)
    if fault in SIGNALS:
        time.sleep(chance.uniform(0.5, 5))  # also before the sweep begins
    else:
        running.wait_for_workers()
        time.sleep(chance.uniform(0, 2))
    family, struck = [], False
    if running.process.poll() is None:
        family = running.family()
        struck = _cause(fault, running, chance)
        if fault in SIGNALS:
            running.process.wait(END_S)
    code, output = running.end()
    assert "Traceback" not in output, (fault, mode, output)
    assert gone(family), (fault, mode)
    assert _nothing_locked(outputs), (fault, mode)
    rows = finished(outputs)
    # A change to the kernels during this test makes cells stale. Rows of two kernel versions aren't duplicates.
    assert not rows.duplicated([name for name in ("key", "kernels_version") if name in rows]).any(), output
    assert len(rows) >= kept, output
    if struck and fault in SIGNALS:
        assert code in (0, 130, -SIGNALS[fault]), (fault, mode, output)  # without tpbench's handler, or at the very end
    return struck and code != 0


def _nothing_locked(outputs: Path) -> bool:
    """Return True if no living process holds the lock of a cell."""
    file = outputs / "rows" / ".claims"
    if not file.exists():
        return True
    with file.open("r+") as claims:
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
    number = SIGNALS.get(fault, signal.SIGKILL)
    for each in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)
    return bool(victims)


def _program(process: psutil.Process) -> str:
    """Return the module that a process runs. torchrun's line names the worker's module too, after its own."""
    with contextlib.suppress(psutil.Error):
        return next((part for part in process.cmdline() if part in _PROGRAMS), "")
    return ""
