"""A torchrun and all it starts, watched and ended as one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from tpbench.launcher.torchrun import MARKER

_PR_SET_PDEATHSIG = 1


class Terminated(BaseException):
    """SIGTERM reached this process. Like KeyboardInterrupt it must not be caught by mistake."""


def raise_on_sigterm() -> None:
    """Make SIGTERM unwind the stack as Ctrl-C does, so that what was started is ended."""

    def raise_terminated(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, raise_terminated)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends, however it ends (Linux; else nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


class ProcessTree:
    """A started command and every process that descends from it.

    torchrun's workers lead sessions of their own, so a signal to the agent's group misses them, and once an agent is
    killed its workers are nobody's children. They are found by the marker that their environment carries.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.row_id = env[MARKER]
        with log.open("wb") as output:
            self.agent = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is ours to handle, once
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )

    def wait(self, timeout_s: float, tick: Callable[[], None]) -> int | None:
        """The agent's exit code, or None if it ran longer than that. Calls `tick` about ten times a second."""
        deadline = time.monotonic() + timeout_s
        while (code := self.agent.poll()) is None:
            if time.monotonic() > deadline:
                return None
            tick()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.agent.wait(0.1)
        return code

    def end(self, grace_s: float = 5.0) -> None:
        """End the agent, which ends its workers, then whatever is left of them. Returns when all are gone."""
        if self.agent.poll() is None:
            self.agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.agent.wait(grace_s)
        while strays := list(self._alive()):
            for process in strays:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(strays, timeout=1.0)
        self.agent.wait()

    def _alive(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.environ().get(MARKER) == self.row_id:
                    if process.status() != psutil.STATUS_ZOMBIE:
                        yield process
