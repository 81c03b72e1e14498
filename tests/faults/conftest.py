"""Counts what was tried, and says so when the tests are done."""

from __future__ import annotations

from collections import Counter

import pytest

_TRIED: Counter[str] = Counter()


@pytest.fixture
def tried() -> Counter[str]:
    """Add to it: what was done to a sweep, by name."""
    return _TRIED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line: the faults of this run."""
    if _TRIED:
        each = ", ".join(f"{name} {count}" for name, count in sorted(_TRIED.items()))
        terminalreporter.write_line(f"{_TRIED.total()} faults tried: {each}")
