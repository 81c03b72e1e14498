"""Run `python -m tpbench` as a user does: real processes, real torchrun, and rows in the test's folder.

The limits in seconds are generous, because other tests run beside this one. They only end what hangs.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tpbench"]
DEFAULT = shlex.split(re.search(r"^ *set -- (-m .*)$", (ROOT / "scripts/run").read_text(), re.MULTILINE)[1])  # type: ignore[index]
"""The arguments that `scripts/run` uses if a user gives none."""

Found = TypeVar("Found")


def environment() -> dict[str, str]:
    """Return this process's environment without the variables that pytest or a surrounding job set."""
    dropped = ("TPBENCH_", "TRITON_INTERPRET", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "PYTHONPATH": str(ROOT)}


def last_of_each(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the last argument for each NAME= in the first one's place.

    So tests can change lines of others, and sweeps keep their order.
    """
    places = (word.partition("=")[0].lstrip("+") if "=" in word else at for at, word in enumerate(arguments))
    return list(dict(zip(places, arguments, strict=True)).values())


def tpbench(
    *arguments: str, cwd: Path, timeout: float = 240, program: Sequence[str] = ("-m", "tpbench")
) -> subprocess.CompletedProcess[str]:
    """Run `python -m tpbench ARGUMENTS`, or another Python program, and wait for its end."""
    line = [sys.executable, *program, *last_of_each(arguments)]
    return subprocess.run(line, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout)


FORKED_COMMANDS = """
import gc, json, os, sys, traceback
import tpbench.__main__, tpbench.launcher.planning.forecast
from tpbench.workloads import workloads
workloads()
gc.freeze()
for folder, arguments in json.load(sys.stdin):
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        continue
    os.chdir(folder)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv[1:] = arguments
    code = 0
    try:
        tpbench.__main__.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""
"""A program that imports tpbench once and forks a process for each command line. Most of a short command is imports.

The end of an interpreter takes as long as a short command, so a child leaves it out."""


def forked(commands: Sequence[Sequence[str]], folder: Path) -> list[tuple[int, Path]]:
    """Run `python -m tpbench ARGUMENTS` for each command line, one after the other.

    Return for each its exit code, and its working folder with the files `stdout` and `stderr`.
    """
    folders = [folder / str(index) for index in range(len(commands))]
    for each in folders:
        each.mkdir()
    lines = json.dumps([(str(each), list(arguments)) for each, arguments in zip(folders, commands, strict=True)])
    line = [sys.executable, "-c", FORKED_COMMANDS]
    # A little below the limit of a test: some tests run thirty commands, and the machine may be busy.
    done = subprocess.run(line, input=lines, env=environment(), capture_output=True, text=True, timeout=550, check=True)
    return list(zip(map(int, done.stdout.split()), folders, strict=True))


def refused(cases: Sequence[tuple[Sequence[str], Sequence[str]]], folder: Path) -> None:
    """Check that each command line fails with its messages, without a traceback, and launches nothing.

    Each case has arguments and the messages that stderr must contain.
    """
    ended = forked([arguments for arguments, _ in cases], folder)
    for (code, each), (arguments, messages) in zip(ended, cases, strict=True):
        errors = (each / "stderr").read_text()
        assert code == 2, arguments
        assert [message for message in messages if message not in errors] == [], errors
        assert "Traceback" not in errors
    assert not list(folder.rglob("sweeps"))


def until(found: Callable[[], Found | None], what: str, evidence: Callable[[], str] | None = None) -> Found:
    """Call `found` until its result is true, and return that result.

    Fail after 200 s with `what` and the text of `evidence`, which shows what happened instead.
    """
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if result := found():
            return result
        time.sleep(0.05)
    raise AssertionError(f"waited too long for {what}{evidence() if evidence else ''}")


def _take_signals() -> None:
    """Take what a command in the foreground takes: in the background or under nohup, pytest ignores these signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Running:
    """A started `python -m tpbench ARGUMENTS`. Tests look at its processes and disturb them while it runs."""

    def __init__(self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        self.cwd = cwd
        self.process = subprocess.Popen(
            [*COMMAND, *last_of_each(arguments)],
            cwd=cwd,
            env={**environment(), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_take_signals,
        )

    def wait_for(self, phase: str, rank: int, cell: int | str = 0) -> psutil.Process:
        """Wait until that rank has logged that phase, and return its process."""

        def worker() -> psutil.Process | None:
            logs = self.cwd.glob(f"outputs/sweeps/*/{cell}/*/attempt_0/{rank}/stderr.log")
            if not any(f"rank {rank}: {phase}" in log.read_text() for log in logs):
                return None
            return next((each for each in self.workers() if each.environ().get("RANK") == str(rank)), None)

        return self.until(worker, f"rank {rank} to be {phase}")

    def until(self, found: Callable[[], Found | None], what: str) -> Found:
        """Call `found` until its result is true, and return that result. Fail if the command ends before."""

        def looked() -> Found | None:
            if self.process.poll() is not None:
                raise AssertionError(f"ended before {what}:\n{self.process.communicate()[0]}")
            return found()

        try:
            return until(looked, what)
        except AssertionError:
            self.process.kill()
            raise

    def wait_for_workers(self) -> None:
        """Wait until a rank exists or the command has ended."""
        while self.process.poll() is None and not self.workers():
            time.sleep(0.05)

    def workers(self) -> list[psutil.Process]:
        """Return the processes of the ranks that run now."""
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if "tpbench.worker.rank" in each.cmdline() and "RANK" in each.environ():
                    found.append(each)
            except psutil.Error:
                continue
        return found

    def family(self) -> list[psutil.Process]:
        """Return all processes that the command has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> tuple[int, str]:
        """Wait for the end, and return the exit code and everything that was printed."""
        output, _ = self.process.communicate(timeout=240)
        return self.process.returncode, output


def gone(processes: list[psutil.Process]) -> bool:
    """Return whether all processes end within some minutes. A zombie counts as ended."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
            return True
        time.sleep(0.1)
    return False
