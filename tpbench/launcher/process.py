"""Supervises a torchrun and every process that it starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import psutil

from tpbench.worker.start import MARKER, STACK_SIGNAL, STORE_FILE, die_with_parent

LAUNCHER = "TPBENCH_LAUNCHER"
"""Environment variable of every process of a job: the launcher that started it, to tell whether that is dead."""

OUTPUT_DIR = "TPBENCH_OUTPUT_DIR"
"""Environment variable of every process of a job: its output folder. A sweep ends orphans of its own folder only."""

KILL_S = 30.0
"""Longest wait for processes that were killed. One that waits for a broken disk may not end at all."""

STACK_S = 0.5
"""Time in which ranks write their stacks."""


def _identity(pid: int) -> str | None:
    """Return a name that no later process can have, or None if there is no such process.

    The name contains the process's start in clock ticks since boot, because a wall clock can be set back.
    """
    try:
        return f"{pid}:{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return str(pid) if psutil.pid_exists(pid) else None


def _namespace() -> str:
    """Return the PID namespace of this process: outside of its container, the same numbers mean other processes."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


class ProcessTree:
    """A started command and every process that descends from it.

    torchrun's workers lead their own sessions, so a signal to the agent's process group misses them. Once an agent is
    killed, its workers have no parent left. They are found by the marker in their environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        keep: Sequence[int] = (),
        cores: Sequence[int] = (),
    ) -> None:
        """Start the command. `keep`: open files that the agent inherits. `cores`: CPUs that it may run on; none:
        all."""
        self.marker = env[MARKER]
        self.store = Path(tempfile.mkdtemp(prefix="tpbench-"))
        """Folder of mode 0700 for the store of the job's processes. Not in the output folder, which may be slow."""
        launcher = os.getpid()

        def bind() -> None:
            die_with_parent(signal.SIGTERM)
            if os.getppid() != launcher:  # the launcher died before the kernel could know
                os._exit(1)
            if cores:
                os.sched_setaffinity(0, cores)

        with log.open("wb") as output:
            self.agent = subprocess.Popen(
                command,
                env={
                    **env,
                    LAUNCHER: f"{_identity(launcher)}@{_namespace()}",
                    STORE_FILE: str(self.store / "store"),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that the terminal's Ctrl-C reaches the launcher alone
                pass_fds=tuple(keep),
                preexec_fn=bind,
            )

    def write_stacks(self) -> None:
        """Let each rank write its stack to its log. A rank that has no handler of the signal yet writes none."""
        for process, environ in _marked():
            with contextlib.suppress(OSError, psutil.Error):
                status = Path(f"/proc/{process.pid}/status").read_text()
                caught = int(status.partition("SigCgt:")[2].split()[0], 16) >> (STACK_SIGNAL - 1) & 1
                if environ[MARKER] == self.marker and caught and "tpbench.worker.rank" in process.cmdline():
                    process.send_signal(STACK_SIGNAL)
        time.sleep(STACK_S)

    def end(self, grace_s: float = 5.0) -> None:
        """End the agent, which ends its workers, then every process that is left. Returns when all have ended."""
        if self.agent.poll() is None:
            self.agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.agent.wait(grace_s)
        _kill(lambda: [process for process, environ in _marked() if environ[MARKER] == self.marker])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.agent.wait(KILL_S)
        shutil.rmtree(self.store, ignore_errors=True)


def _kill(find: Callable[[], list[psutil.Process]]) -> None:
    """Kill the processes that `find` returns until there are none."""
    deadline = time.monotonic() + KILL_S
    while (processes := find()) and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=1.0)


def end_orphans(output_dirs: Iterable[str]) -> None:
    """End the processes of jobs with these output folders whose launcher is dead.

    They would end by themselves, but might save a result before. A launcher in another container counts as alive: this
    process cannot see it.
    """
    here = {os.path.realpath(each) for each in output_dirs}
    _kill(lambda: [process for process, environ in _marked() if _is_orphan(environ, here)])


def _is_orphan(environ: Mapping[str, str], output_dirs: Set[str]) -> bool:
    launcher, _, namespace = environ.get(LAUNCHER, "").partition("@")
    if namespace != _namespace() or environ.get(OUTPUT_DIR) not in output_dirs:
        return False
    return _identity(int(launcher.partition(":")[0])) != launcher


def _marked() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Yield every living process of any job, with its environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environ = process.environ()
            if MARKER in environ and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                yield process, environ
