"""Supervises a torchrun and every process that it starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tpbench.worker.start import MARKER, STACK_SIGNAL, STORE_FILE, die_with_parent

KILL_S = 30.0
"""Longest wait for processes that were killed. One that waits for a broken disk may not end at all."""

STACK_S = 0.5
"""Time in which ranks write their stacks."""


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
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of this process would only note it
            die_with_parent(signal.SIGTERM)
            if os.getppid() != launcher:  # the launcher died before the kernel could know
                os._exit(1)
            if cores:
                os.sched_setaffinity(0, cores)

        with log.open("wb") as output:
            self.agent = subprocess.Popen(
                command,
                env={**env, STORE_FILE: str(self.store / "store")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that the terminal's Ctrl-C reaches the launcher alone
                pass_fds=tuple(keep),
                preexec_fn=bind,
            )

    def write_stacks(self) -> None:
        """Let each rank write its stack to its log, right before the end. Processes without a handler end at once."""
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                if process.pid != self.agent.pid:
                    process.send_signal(STACK_SIGNAL)
        time.sleep(STACK_S)

    def end(self, grace_s: float = 5.0) -> None:
        """End the agent, which ends its workers, then every process that is left. Returns when all have ended."""
        if self.agent.poll() is None:
            self.agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.agent.wait(grace_s)
        deadline = time.monotonic() + KILL_S
        while (processes := self._processes()) and time.monotonic() < deadline:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.agent.wait(KILL_S)
        shutil.rmtree(self.store, ignore_errors=True)

    def _processes(self) -> list[psutil.Process]:
        """Return the living processes of the job."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARKER) == self.marker and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found
