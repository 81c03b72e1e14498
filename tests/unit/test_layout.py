"""The layout of the package that import-linter cannot check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "tpbench"


def test_the_package_root_holds_at_most_five_modules() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 5


def maps() -> dict[str, str]:
    """Return the docstring of each folder that lists its modules."""
    found = {}
    for file in sorted(PACKAGE.rglob("__init__.py")):
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        if "The modules, in the order of a first reading" in text:
            found[str(file.parent.relative_to(PACKAGE))] = text
    return found


@pytest.mark.parametrize("folder", maps())
def test_a_list_of_modules_names_every_module(folder: str) -> None:
    _, _, listed = maps()[folder].partition("The modules, in the order of a first reading")
    modules = {file.stem for file in (PACKAGE / folder).glob("*.py")} - {"__init__"}
    modules |= {file.parent.name for file in (PACKAGE / folder).glob("*/__init__.py")}
    assert modules <= set(re.findall(r"`(\w+)`", listed))
