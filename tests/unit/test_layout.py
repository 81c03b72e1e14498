"""The layout of the package that import-linter cannot check."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "tpbench"


def test_the_package_root_holds_at_most_five_modules() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 5
