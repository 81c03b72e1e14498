"""Ranks that wait until a test has done to them what it has to: on no machine is their job over before."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from tests.command import ROOT, Running

HOOK = """
import os, sys, time
def hook(event, arguments):
    if event == "import" and arguments[0] == "torch" and "RANK" in os.environ:
        open({waiting!r}, "a").close()
        while os.path.exists({hold!r}):
            time.sleep(0.02)
sys.addaudithook(hook)
"""


class Held:
    """Ranks of commands with this environment stay in the phase `importing torch` until they are released."""

    def __init__(self, folder: Path) -> None:
        self.hold, self.waiting = folder / "hold", folder / "waiting"
        self.hold.touch()
        self.path = folder / "held"
        self.path.mkdir()
        (self.path / "sitecustomize.py").write_text(HOOK.format(waiting=str(self.waiting), hold=str(self.hold)))
        self.env = {"PYTHONPATH": f"{self.path}{os.pathsep}{ROOT}"}

    def wait(self, timeout: float = 90) -> None:
        """Until a rank waits."""
        deadline = time.monotonic() + timeout
        while not self.waiting.exists():
            assert time.monotonic() < deadline, "waited too long for a rank"
            time.sleep(0.02)

    def release(self) -> None:
        """Let them go on, and those to come."""
        self.hold.unlink()


def wait_for_claims(running: Running, timeout: float = 90) -> None:
    """Until that command asks which cells another sweep has."""
    deadline = time.monotonic() + timeout
    while not any(each.path.endswith("/.claims") for each in psutil.Process(running.process.pid).open_files()):
        assert time.monotonic() < deadline, "waited too long for the claims"
        time.sleep(0.02)
