"""Call functions in forked processes, some at a time, with limits."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

ASLEEP_S = 20
"""A process that sleeps twice, and has used almost no CPU time for so long, waits for something that never comes."""


@dataclass(frozen=True)
class Task:
    run: Callable[[], int]
    """Returns an exit code."""
    limit_s: float
    """CPU seconds."""


def forked(tasks: Sequence[Task], processes: int) -> Iterator[tuple[int, int]]:
    """Call each function in a silent process of its own. Yield its index and its exit code, or minus a signal."""
    running: dict[int, _Watched] = {}
    waiting = list(enumerate(tasks))[::-1]
    while waiting or running:
        while waiting and len(running) < processes:
            at, task = waiting.pop()
            running[at] = _Watched(task)
        time.sleep(0.02)
        for at, watched in list(running.items()):
            if (code := watched.ended()) is not None:
                del running[at]
                yield at, code


class _Watched:
    def __init__(self, task: Task) -> None:
        def child() -> None:
            resource.setrlimit(resource.RLIMIT_CPU, (int(task.limit_s), int(task.limit_s) + 1))
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            os._exit(int(task.run()))

        self.process: BaseProcess = multiprocessing.get_context("fork").Process(target=child)
        self.process.start()
        self.used_s, self.asleep, self.next_look = 0.0, False, time.monotonic() + ASLEEP_S

    def ended(self) -> int | None:
        """Return the exit code, or None if the process goes on. A process that waits for nothing is killed."""
        if self.process.is_alive() and time.monotonic() > self.next_look:
            used_s, asleep = _state(self.process.pid)
            if asleep and self.asleep and used_s < self.used_s + 0.1:
                self.process.kill()
                self.process.join()
            self.used_s, self.asleep, self.next_look = used_s, asleep, time.monotonic() + ASLEEP_S
        return self.process.exitcode


def _state(pid: int | None) -> tuple[float, bool]:
    """Return a process's CPU seconds, and whether it waits for something other than a core."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        used = process.cpu_times()
        return used.user + used.system, process.status() == psutil.STATUS_SLEEPING
    return 0.0, False
