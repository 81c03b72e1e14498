"""A row that the outputs do not take goes where nobody else can put or replace one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.support.launcher_rows import cell
from tpbench.handover.rescue import rescue_folder, rescued
from tpbench.handover.task import CellRow


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def put(folder: Path) -> str:
    row = CellRow.begin(cell(0, folder).job)
    row.write("ok", output_dir=str(folder))
    return row.row_id


def test_the_usual_folder_is_made_and_used_again(temporary: Path) -> None:
    folder = rescue_folder()
    assert folder == temporary / f"tpbench-rescued-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    row_id = put(folder)
    assert rescue_folder() == folder
    assert rescued(row_id) == folder / "rows" / f"{row_id}.parquet"
    assert rescued("another") is None


def spoil(folder: Path, how: str) -> None:
    if how == "a link":
        elsewhere = folder.with_name("elsewhere")
        elsewhere.mkdir()
        folder.symlink_to(elsewhere)
    elif how == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777) if how == "open to all" else os.chown(folder, 12345, 12345)


@pytest.mark.parametrize("how", ["a link", "a file", "open to all", "another user's"])
def test_a_folder_that_others_may_have_made_is_left_alone(how: str, temporary: Path) -> None:
    if how == "another user's" and os.getuid():
        pytest.skip("only root can give a folder away")
    usual = temporary / f"tpbench-rescued-{os.getuid()}"
    spoil(usual, how)
    folder = rescue_folder()
    assert folder != usual and folder.parent == temporary
    assert folder.stat().st_mode & 0o777 == 0o700
    row_id = put(folder)
    assert rescued(row_id) == folder / "rows" / f"{row_id}.parquet"
    if usual.is_dir():
        assert list(usual.iterdir()) == []
        assert rescued(put(usual)) is None  # whoever put it there
