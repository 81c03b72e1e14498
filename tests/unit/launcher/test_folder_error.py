"""Messages about an output folder that cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpbench.__main__ import _folder_error as folder_error


def test_the_output_folder_is_named() -> None:
    error = FileNotFoundError(2, "No such file or directory", "/proc/nope")
    expected = (
        "output_dir=/proc/nope/rows cannot be written: No such file or directory (/proc/nope); set another "
        "output_dir=DIR"
    )
    assert folder_error(error, ["-m", "tokens=64", "output_dir=/proc/nope/rows"]) == expected
    assert folder_error(error, ["output_dir='/proc/nope/rows',other"]) == expected


def test_the_default_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = PermissionError(13, "Permission denied", "outputs/sweeps")
    assert folder_error(error, []).startswith(
        "output_dir=outputs cannot be written: Permission denied (outputs/sweeps)"
    )


def test_other_errors_are_unchanged() -> None:
    for error in (OSError(28, "No space left on device", "/elsewhere/file"), OSError("no file")):
        assert folder_error(error, ["output_dir=/proc/nope"]) == str(error)
