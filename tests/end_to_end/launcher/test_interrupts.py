"""Signals that reach a launcher: noted at once, raised where nothing is half done."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import ROOT, environment
from tpbench.launcher import interrupts
from tpbench.launcher.interrupts import Terminated
from tpbench.launcher.slurm import cluster


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Take signals that are ignored if the tests were started in the background or under nohup."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in interrupts.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_a_signal_is_raised_once_and_only_where_nothing_is_half_done(number: signal.Signals) -> None:
    done = False
    with pytest.raises(Terminated), interrupts.noted():
        signal.raise_signal(number)
        done = True
        interrupts.sleep(60)
    assert done
    interrupts.check()


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
    with pytest.raises(Terminated), interrupts.noted():
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        cluster.states(["1"])
    assert time.monotonic() - began < 20
