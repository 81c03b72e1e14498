"""A small disk, and a record of the faults that each test causes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def fault_record(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Put the faults of a test into its report, which also travels from the processes of pytest-xdist."""
    for marker in request.node.iter_markers("fault"):
        for fault in marker.args:
            record_property("fault", fault)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 4 MB for one test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("a disk of the test's own needs the right to mount one")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
