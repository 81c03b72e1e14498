"""Hold ranks at a known point, so that a test can disturb them before their job ends, on any machine.

A held rank sleeps. So a job need not be long to be disturbed in time.
"""

import os
from pathlib import Path

import psutil

from tests.support.command import ROOT, Running, until

HOOK = """
import os, sys, time
def hold(text, write=sys.stderr.write):
    count = write(text)
    if {phase!r} in text and sys.argv[-1].endswith({task!r}):
        sys.stderr.flush()
        while os.path.exists({hold!r}):
            time.sleep(0.02)
    return count
if "RANK" in os.environ:
    sys.stderr.write = hold
"""


class Held:
    """Hold the ranks of commands with the environment `env` as soon as they have logged `phase`, until `release`."""

    def __init__(self, folder: Path, phase: str = "importing torch", task: str = "") -> None:
        """Hold ranks from now on. `task`: the end of the path of a task file, to hold the ranks of that task only."""
        self.hold = folder / "hold"
        self.hold.touch()
        self.path = folder / "held"
        self.path.mkdir()
        (self.path / "sitecustomize.py").write_text(HOOK.format(phase=phase, task=task, hold=str(self.hold)))
        self.env = {"PYTHONPATH": f"{self.path}{os.pathsep}{ROOT}"}

    def release(self) -> None:
        """Let the held ranks continue, and hold no later ones."""
        self.hold.unlink()


def wait_for_claims(running: Running) -> None:
    """Wait until that command checks which cells another sweep has claimed."""
    process = psutil.Process(running.process.pid)
    until(lambda: any(each.path.endswith("/.claims") for each in process.open_files()), "the claims")
