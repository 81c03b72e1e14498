"""The layout of the package that import-linter cannot check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "tpbench"


def test_the_package_root_holds_at_most_six_modules() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 6


def modules(folder: Path) -> set[str]:
    files = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    return files | {file.parent.name for file in folder.glob("*/__init__.py")}


FOLDERS = sorted(
    str(file.parent.relative_to(PACKAGE)) for file in PACKAGE.rglob("__init__.py") if len(modules(file.parent)) > 3
)
FOLDERS.remove(".")  # README.md and CONTRIBUTING.md describe its folders
FOLDERS.remove("api")  # a module for each workload
FOLDERS.remove("api/examples")


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_lists_its_modules_for_readers(folder: str) -> None:
    """The list is in the docstring of the folder or in its README, or in the items of the folder above that name it."""
    items = re.split(r"\n(?=- |\| )", listed(PACKAGE / folder).strip())
    above = re.split(r"\n(?=- |\| )", listed((PACKAGE / folder).parent).strip())
    items += [each for each in above if re.match(rf"(- |\| )`{Path(folder).name}`:", each)]
    assert modules(PACKAGE / folder) - set(re.findall(r"`(\w+)`", "".join(items))) == set()


def listed(folder: Path) -> str:
    readme = folder / "README.md"
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return readme.read_text() if readme.exists() else text.partition("The modules, in the order of a first reading")[2]
