"""Signals that reach a launcher: noted at once, raised where nothing is half done."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT, environment
from tpbench.launcher import interrupts
from tpbench.launcher.interrupts import Terminated
from tpbench.launcher.slurm import cluster
from tpbench.launcher.torchrun import ProcessTree
from tpbench.worker.start import MARKER


class SignalledLock:
    """The lock of `Popen`, which a signal follows: it comes after the lock is taken, and before the `try`."""

    def __init__(self, number: int) -> None:
        self.number, self.lock = number, threading.Lock()

    def acquire(self, *arguments: Any) -> bool:
        taken = self.lock.acquire(*arguments)
        number, self.number = self.number, 0
        signal.raise_signal(number) if number else None
        return taken

    def release(self) -> None:
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Take signals that are ignored if the tests were started in the background or under nohup."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in interrupts.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("how", ["poll", "wait"])
def test_a_signal_within_popen_leaves_no_lock_behind(how: str, number: signal.Signals, tmp_path: Path) -> None:
    with pytest.raises(Terminated), interrupts.noted():
        tree = ProcessTree(["sleep", "60"], {**os.environ, MARKER: tmp_path.name}, tmp_path / "log")
        tree.agent._waitpid_lock = SignalledLock(number)  # type: ignore[attr-defined]
        try:
            if how == "poll":
                assert tree.agent.poll() is None
            else:
                with pytest.raises(subprocess.TimeoutExpired):
                    tree.agent.wait(0.1)
            interrupts.sleep(60)
        finally:
            began = time.monotonic()
            tree.end()
            assert time.monotonic() - began < 20
            assert tree.agent.returncode is not None
    interrupts.check()  # raised once


NESTED = """
import signal
from tpbench.launcher import interrupts
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
interrupts.exit_at_once()
signal.raise_signal(signal.SIGHUP)
try:
    {lines}
finally:
    print("unwound", flush=True)
"""
BEFORE = "signal.raise_signal(signal.SIGTERM)"
TWICE = """with interrupts.noted():
        signal.raise_signal(signal.SIGTERM)
        print("noted", flush=True)
        signal.raise_signal(signal.SIGINT)"""


@pytest.mark.parametrize(("lines", "printed", "code"), [(BEFORE, "", 130), (TWICE, "noted\n", -signal.SIGINT)])
def test_before_a_sweep_one_signal_ends_the_launcher_at_once_and_later_the_second(
    lines: str, printed: str, code: int
) -> None:
    program = [sys.executable, "-c", NESTED.format(lines=lines)]
    done = subprocess.run(program, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (printed, code)


def test_a_command_of_slurm_that_is_silent_delays_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    began = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Terminated), interrupts.noted():
        cluster.states(["1"])
    assert time.monotonic() - began < 20
