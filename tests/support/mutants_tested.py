"""Run the tests of a package on each of its mutants, in processes that are forked when the tests are collected.

A mutant of a function's body replaces the code of the imported function. A mutant of anything that runs while modules
are imported or tests are collected needs a process that has imported nothing of tpbench, and its source is changed
during the import. No file is changed, so mutants can be tested side by side.
"""

from __future__ import annotations

import gc
import importlib.machinery
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest

from tests.support.mutants_forked import Task, forked
from tests.support.mutants_made import Mutant

PYTEST = (
    "-qx", "-pno:cacheprovider", "-pno:xdist", "-pno:timeout", "--basetemp=tests-write-here",
    "-oaddopts=--import-mode=importlib", "-otmp_path_retention_policy=none",
)  # fmt: skip
CAUGHT, TIMEOUT, SURVIVED = "caught", "timeout", "survived"
_OPTIMIZED = 1
"""The flag of a function's code, in contrast to that of a class or module."""


@dataclass(frozen=True)
class Chosen:
    """Tests that run a mutant's line, in the order in which they run."""

    tests: Sequence[str]
    limit_s: float
    """CPU seconds."""
    imported: bool
    """The line runs while modules are imported or tests are collected."""


def outcomes(mutants: Sequence[Mutant], source: str, tests: list[str], processes: int) -> Iterator[tuple[Mutant, str]]:
    """Yield each mutant of a package with "caught", "timeout" or "survived"."""
    at_import: list[tuple[Mutant, Chosen]] = []
    collected = _Collected(source, mutants, processes)
    for message in _messages(lambda send: collected.run(tests, send)):
        mutant, found = mutants[message[0]], message[1]
        if isinstance(found, Chosen):
            at_import.append((mutant, found))
        else:
            yield mutant, found
    again = [Task(_in_a_new_process(mutant, chosen), chosen.limit_s + 20) for mutant, chosen in at_import]
    for at, code in forked(again, processes):
        yield at_import[at][0], _outcome(code)


def _messages(run: Callable[[Callable[[Any], None]], int]) -> Iterator[Any]:
    """Call `run` in a forked process, and yield what it sends. Raise SystemExit if it fails."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        os._exit(run(sender.send))

    process = context.Process(target=child)
    process.start()
    sender.close()
    while True:
        try:
            yield receiver.recv()
        except EOFError:
            break
    process.join()
    if process.exitcode:
        failed = Path("failed")
        raise SystemExit(f"without a mutant fails {failed.read_text() if failed.exists() else process.exitcode}")


class _Collected:
    """A plugin of pytest that collects tests once, finds which lines each runs, and runs them on each mutant."""

    def __init__(self, source: str, mutants: Sequence[Mutant], processes: int) -> None:
        self.mutants, self.processes = mutants, processes
        self.coverage = coverage.Coverage(data_file=str(Path("covered").resolve()), include=[source, f"{source}/**"])
        self.send: Callable[[Any], None] = print

    def run(self, tests: list[str], send: Callable[[Any], None]) -> int:
        self.send = send
        Path("covered").unlink(missing_ok=True)
        self.coverage.start()
        return pytest.main([*PYTEST, *tests], plugins=[self])

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        spent = self._run_all(session)
        self.coverage.stop()
        data = coverage.CoverageData("covered")
        data.read()
        lines = {os.path.relpath(path): data.contexts_by_lineno(path) for path in data.measured_files()}
        assert lines, "no test runs a line of the source"
        functions = _functions(set(lines))
        tasks, numbers = [], []
        for number, mutant in enumerate(self.mutants):
            chosen = _choose(mutant, lines.get(mutant.path, {}), session.items, spent)
            if not chosen.tests:
                self.send((number, SURVIVED))
            elif chosen.imported or (changed := _changed(mutant)) is None:
                self.send((number, chosen))
            else:
                tasks.append(Task(_on_mutant(session, chosen.tests, changed, functions[mutant.path]), chosen.limit_s))
                numbers.append(number)
        for at, code in forked(tasks, self.processes):
            self.send((numbers[at], _outcome(code)))
        return True

    def _run_all(self, session: pytest.Session) -> dict[str, float]:
        """Run all tests in a forked process, save which lines each runs, and return their CPU seconds."""
        spent, failed = Path("spent"), Path("failed")

        def run() -> int:
            with spent.open("w") as file:
                for item, following in zip(session.items, [*session.items[1:], None], strict=True):
                    before = time.process_time()
                    self.coverage.switch_context(item.nodeid)
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    file.write(f"{time.process_time() - before}\n")
                    if session.testsfailed:
                        failed.write_text(item.nodeid)
                        return 1
            self.coverage.stop()
            self.coverage.save()
            return 0

        [(_, code)] = forked([Task(run, 1200)], 1)
        if code:
            pytest.exit("a test fails without a mutant", returncode=1)
        times = map(float, spent.read_text().split())
        return dict(zip([item.nodeid for item in session.items], times, strict=True))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        """Attribute a shared fixture's lines to every test that has the fixture."""
        if fixturedef.scope == "function" or not self.coverage._started:
            return (yield)
        self.coverage.switch_context(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.coverage.switch_context(request._pyfuncitem.nodeid)


def _choose(mutant: Mutant, lines: dict[int, list[str]], items: list[Any], spent: dict[str, float]) -> Chosen:
    """Choose the tests that run a mutant's lines: files named after the source first, then the fastest files."""
    contexts = {name for line in mutant.lines for name in lines.get(line, ())}
    imported = "" in contexts
    if imported:  # every test that runs a line of the file may notice
        contexts = {name for each in lines.values() for name in each}
    found = [
        item for item in items if item.nodeid in contexts or any(f"fixture {n}" in contexts for n in item.fixturenames)
    ]
    if imported and not found:
        found = items
    by_file: dict[str, list[str]] = defaultdict(list)
    for item in found:
        by_file[item.nodeid.split("::")[0]].append(item.nodeid)
    stem = Path(mutant.path).stem
    files = sorted(by_file, key=lambda file: (stem not in file, sum(spent[test] for test in by_file[file])))
    tests = [test for file in files for test in by_file[file]]
    return Chosen(tests, 10 + 3 * sum(spent[test] for test in tests), imported)


def _on_mutant(
    session: pytest.Session,
    tests: Sequence[str],
    changed: list[tuple[CodeType, CodeType]],
    functions: list[FunctionType],
) -> Callable[[], int]:
    def run() -> int:
        for before, after in changed:
            for function in functions:
                code = function.__code__
                if (code.co_qualname, code.co_firstlineno) == (before.co_qualname, before.co_firstlineno):
                    function.__code__ = after
        by_name = {item.nodeid: item for item in session.items}
        items = [by_name[test] for test in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return 1
        return 0

    return run


def _in_a_new_process(mutant: Mutant, chosen: Chosen) -> Callable[[], int]:
    class Selected:
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            order = {test: at for at, test in enumerate(chosen.tests)}
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    def run() -> int:
        path, code = str(Path(mutant.path).resolve()), mutant.code()
        get_code = importlib.machinery.SourceFileLoader.get_code

        def changed_code(loader: Any, name: str) -> CodeType | None:
            return compile(code, path, "exec") if loader.path == path else get_code(loader, name)

        importlib.machinery.SourceFileLoader.get_code = changed_code  # type: ignore[method-assign]
        files = dict.fromkeys(test.split("::")[0] for test in chosen.tests)
        return pytest.main([*PYTEST, *files], plugins=[Selected()])

    return run


def _functions(paths: set[str]) -> dict[str, list[FunctionType]]:
    """Return the functions of each file that exist in this process."""
    found: dict[str, list[FunctionType]] = defaultdict(list)
    absolute = {str(Path(path).resolve()): path for path in paths}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in absolute:
            found[absolute[each.__code__.co_filename]].append(each)
    return found


def _changed(mutant: Mutant) -> list[tuple[CodeType, CodeType]] | None:
    """Return the functions' code that differs, before and after, or None if other code differs."""
    path = str(Path(mutant.path).resolve())
    before = compile(Path(path).read_text(), path, "exec", dont_inherit=True)
    try:
        after = compile(mutant.code(), path, "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return _differing(before, after)


def _differing(before: CodeType, after: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    inner = [[each for each in code.co_consts if isinstance(each, CodeType)] for code in (before, after)]
    found = []
    if before.co_flags & _OPTIMIZED:
        if before != after:
            found.append((before, after))
    elif len(inner[0]) != len(inner[1]) or _own(before) != _own(after):
        return None
    for pair in zip(*inner, strict=False):
        if (deeper := _differing(*pair)) is None:
            return None
        found += deeper
    return found


def _own(code: CodeType) -> tuple[object, ...]:
    """Return what the code of a class or module does itself."""
    constants = [repr(each) for each in code.co_consts if not isinstance(each, CodeType)]
    return code.co_code, code.co_names, constants


def _outcome(code: int) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return TIMEOUT
    return CAUGHT if code else SURVIVED
