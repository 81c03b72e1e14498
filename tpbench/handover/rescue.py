"""Where a row goes that the output folder would not take: a folder for temporary files that is this user's alone."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from tpbench.results.write import row_path

PREFIX = "tpbench-rescued-"


def rescue_folder() -> Path:
    """One that nobody else can write to. That with the usual name may be another's, for anyone can foretell it."""
    usual = Path(tempfile.gettempdir(), f"{PREFIX}{os.getuid()}")
    try:
        usual.mkdir(mode=0o700)
    except OSError:
        if not _private(usual):
            return Path(tempfile.mkdtemp(prefix=PREFIX))
    return usual


def rescued(row_id: str) -> Path | None:
    """The file of a row that was put into such a folder on this host."""
    folders = filter(_private, Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    return next((file for each in folders if (file := row_path(each, row_id)).exists()), None)


def _private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return mine and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
