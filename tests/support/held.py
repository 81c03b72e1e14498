"""Ranks that wait until a test has done to them what it has to: on no machine is their job over before."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tests.support.command import ROOT, Running, until

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

    def wait(self) -> None:
        """Until a rank waits."""
        until(self.waiting.exists, "a rank")

    def release(self) -> None:
        """Let them go on, and those to come."""
        self.hold.unlink()


def wait_for_claims(running: Running) -> None:
    """Until that command asks which cells another sweep has."""
    process = psutil.Process(running.process.pid)
    until(lambda: any(each.path.endswith("/.claims") for each in process.open_files()), "the claims")
