"""Counts what was tried, and says so when the tests are done."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fault_catalogue import FAULTS, Tried

_TRIED = Tried()


@pytest.fixture
def tried() -> Tried:
    """Add to it: what was done to a sweep, by its name in the catalogue."""
    return _TRIED


@pytest.fixture
def disk(tmp_path: Path, tried: Tried) -> Iterator[Path]:
    """A small one of the test's own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True).returncode:
        tried.impossible |= {"the disk is full", "outputs become read-only"}
        pytest.skip("a disk of the test's own needs the right to mount one")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line: the faults of this run."""
    if _TRIED:
        each = ", ".join(f"{name} {_TRIED[name]}" for name in FAULTS if _TRIED[name])
        terminalreporter.write_line(f"{_TRIED.total()} faults tried: {each}")
        if missing := _TRIED.missing():
            terminalreporter.write_line(f"not tried in this run: {', '.join(missing)}")
