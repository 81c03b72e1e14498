"""A module can be imported although the packages around it cannot."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpbench.workloads.lone_module import import_alone

PACKAGES = ("lone_project", "lone_project.inner")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A project whose compiled part is missing, and whose kernel needs a neighbour."""
    inner = tmp_path / "lone_project/inner"
    inner.mkdir(parents=True)
    (tmp_path / "lone_project/__init__.py").write_text("import compiled_part_of_lone_project\n")
    (inner / "__init__.py").write_text("raise RuntimeError('no library')\n")
    (inner / "neighbour.py").write_text("ANSWER = 42\n")
    (inner / "kernel.py").write_text(
        "from lone_project.inner.neighbour import ANSWER\ndef kernel():\n    return 2 * ANSWER\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "lone_project"]:
        del sys.modules[name]


def test_a_module_needs_no_code_of_its_packages_which_other_code_then_imports_as_they_are() -> None:
    module = import_alone("lone_project.inner.kernel", PACKAGES)
    assert module.kernel() == 84 and import_alone("lone_project.inner.kernel", PACKAGES) is module
    with pytest.raises(ModuleNotFoundError, match="compiled_part_of_lone_project"):
        importlib.import_module("lone_project")
    for name, packages in (("lone_project.inner.other", PACKAGES), ("no_project.kernel", ("no_project",))):
        with pytest.raises(ModuleNotFoundError, match=r"lone_project\.inner\.other|no_project"):
            import_alone(name, packages)
        assert not set(packages) & sys.modules.keys()


def test_an_imported_package_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    package = type(sys)("lone_project")
    package.__path__ = [str(Path(sys.path[0]) / "lone_project")]
    monkeypatch.setitem(sys.modules, "lone_project", package)
    import_alone("lone_project.inner.kernel", PACKAGES)
    assert sys.modules["lone_project"] is package
