"""Hold ranks at a known point, so that a test can disturb them before their job ends, on any machine."""

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
    """Hold the ranks of commands with the environment `env` in the phase `importing torch` until `release`."""

    def __init__(self, folder: Path) -> None:
        self.hold, self.waiting = folder / "hold", folder / "waiting"
        self.hold.touch()
        self.path = folder / "held"
        self.path.mkdir()
        (self.path / "sitecustomize.py").write_text(HOOK.format(waiting=str(self.waiting), hold=str(self.hold)))
        self.env = {"PYTHONPATH": f"{self.path}{os.pathsep}{ROOT}"}

    def wait(self) -> None:
        """Wait until a rank is held."""
        until(self.waiting.exists, "a rank")

    def release(self) -> None:
        """Let the held ranks continue, and hold no later ones."""
        self.hold.unlink()


def wait_for_claims(running: Running) -> None:
    """Wait until that command checks which cells another sweep has claimed."""
    process = psutil.Process(running.process.pid)
    until(lambda: any(each.path.endswith("/.claims") for each in process.open_files()), "the claims")
