"""Run the tests of a mutant in a forked process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import coverage
import psutil
import pytest

from tests.support.mutants_made import Mutant

PYTEST = ("-qx", "-pno:cacheprovider", "-pno:xdist", "-pno:timeout", "-oaddopts=--import-mode=importlib")
ASLEEP_S = 20
"""A process that uses almost no CPU time for so long waits for something that never comes."""

Covering = dict[str, dict[int, list[str]]]
"""For each source file and line, the test functions that run it. An empty name is an import or a fixture."""


def covering_tests(source: str, tests: list[str]) -> tuple[Covering, float]:
    """Run the tests. Return which of them run which line, and their CPU seconds."""
    data = Path("covered").resolve()
    data.unlink(missing_ok=True)

    def run() -> int:
        measured = coverage.Coverage(data_file=str(data), include=[source, f"{source}/**"])
        measured.set_option("run:dynamic_context", "test_function")
        with measured.collect():
            code = pytest.main([*PYTEST, *tests])
        measured.save()
        return code

    before = _children_s()
    if code := _forked(run, limit_s=600):
        raise SystemExit(f"{' '.join(tests)} fails without a mutant: {code}")
    measured = coverage.CoverageData(str(data))
    measured.read()
    covering = {os.path.relpath(path): measured.contexts_by_lineno(path) for path in measured.measured_files()}
    assert covering, "no test runs a line of the source"
    return covering, _children_s() - before


def outcome(mutant: Mutant, covering: Covering, tests: str, limit_s: float) -> str:
    """Return "caught", "timeout" or "survived"."""
    lines = covering.get(mutant.path, {})
    names = {name for line in mutant.lines for name in lines.get(line, ())}
    if not names:
        return "survived"
    if "" in names:  # the line is run by an import: every test that runs a line of the file may notice
        names = {name for each in lines.values() for name in each if name}
    source = Path(mutant.path)
    # The tests that are named after the file come first.
    chosen = sorted(map(_node_id, names), key=lambda test: (source.stem not in test, test)) or [tests]
    before = source.read_text()
    try:
        source.write_text(mutant.code())
        code = _forked(lambda: pytest.main([*PYTEST, *chosen]), limit_s)
    finally:
        source.write_text(before)
    if code == -signal.SIGXCPU or code == -signal.SIGKILL:
        return "timeout"
    return "caught" if code else "survived"


def _cpu_s(pid: int | None) -> float:
    with contextlib.suppress(psutil.Error):
        used = psutil.Process(pid).cpu_times()
        return used.user + used.system
    return 0.0


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _node_id(name: str) -> str:
    """Return pytest's name of a test: `tests.unit.test_job.test_x` becomes `tests/unit/test_job.py::test_x`."""
    module, function = name.rsplit(".", 1)
    return f"{module.replace('.', '/')}.py::{function}"


def _forked(run: Callable[[], int], limit_s: float) -> int:
    """Call `run` in a forked process without output, and return its exit code, or minus its signal."""

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 1))
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        os._exit(int(run()))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    used_s = -1.0
    while process.is_alive() and (now_s := _cpu_s(process.pid)) > used_s + 0.1:
        used_s = now_s
        process.join(ASLEEP_S)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode
