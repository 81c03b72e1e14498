"""A torchrun and all it starts, watched and ended as one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import FrameType

import psutil

from tpbench.launcher.torchrun import LAUNCHER, MARKER, OUTPUT_DIR

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


def parent_is_of(row_id: str) -> bool:
    """Whether this process's parent is of the same job. If not, that one died before its death could be signalled."""
    try:
        environ = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except FileNotFoundError:
        return sys.platform != "linux"
    except OSError:
        return False
    return any(each.startswith(f"{MARKER}={row_id}".encode()) for each in environ.split(b"\0"))


def _identity(pid: int) -> str | None:
    """A name that no later process will have, or None if there is no such process: when it was started, in ticks since
    the machine was (a clock can be set back)."""
    try:
        return f"{pid}:{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return str(pid) if psutil.pid_exists(pid) else None


def _namespace() -> str:
    """What a container has of its own and processes are numbered in: outside it, its numbers are those of others."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


class ProcessTree:
    """A started command and every process that descends from it.

    torchrun's workers lead sessions of their own, so a signal to the agent's group misses them, and once an agent is
    killed its workers are nobody's children. They are found by the marker that their environment carries.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        keep: Sequence[int] = (),
        cores: Sequence[int] = (),
    ) -> None:
        """`keep`: open files that the agent inherits. `cores`: those that it may run on; none means any."""
        self.marker = env[MARKER]
        launcher = os.getpid()

        def bind() -> None:
            die_with_parent(signal.SIGTERM)
            if os.getppid() != launcher:  # it died before that could be signalled
                os._exit(1)
            if cores:
                os.sched_setaffinity(0, cores)

        with log.open("wb") as output:
            self.agent = subprocess.Popen(
                command,
                env={**env, LAUNCHER: f"{_identity(launcher)}@{_namespace()}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is ours to handle, once
                pass_fds=tuple(keep),
                preexec_fn=bind,
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
        for process, environ in _marked():
            if environ[MARKER] == self.marker:
                yield process


def end_orphans(output_dirs: Iterable[str]) -> None:
    """End what is left of jobs with these output folders whose launcher is dead: they are about to end by themselves,
    but might write a row before they do. Whether a launcher in another container lives cannot be told from here."""
    here = {os.path.realpath(each) for each in output_dirs}
    while orphans := [process for process, environ in _marked() if _is_orphan(environ, here)]:
        for process in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(orphans, timeout=1.0)


def _is_orphan(environ: Mapping[str, str], output_dirs: Set[str]) -> bool:
    launcher, _, namespace = environ.get(LAUNCHER, "").partition("@")
    if namespace != _namespace() or environ.get(OUTPUT_DIR) not in output_dirs:
        return False
    return _identity(int(launcher.partition(":")[0])) != launcher


def _marked() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Every living process of a job, with its environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environ = process.environ()
            if MARKER in environ and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                yield process, environ
