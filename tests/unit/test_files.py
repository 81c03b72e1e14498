"""Files that are replaced whole, or not at all."""

import errno
import os
from pathlib import Path

import pytest

from tpbench import files


def test_a_full_disk_leaves_the_old_content_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "task.json"
    files.replace_file(file, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.replace_file(file, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["task.json"]
    assert file.read_text() == "old"


def test_a_folder_that_cannot_be_flushed_is_no_error_but_a_broken_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_with(number: int) -> None:
        def fsync(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    fails_with(errno.EINVAL)
    files.sync_folder(tmp_path)
    fails_with(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        files.sync_folder(tmp_path)
