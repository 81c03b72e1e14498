"""Files that are whole and survive a power cut, or do not exist."""

from __future__ import annotations

import errno
import os
from pathlib import Path

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk or a quota that is full."""

_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


def replace_file(file: Path, content: str) -> None:
    """Write a text file. A reader sees the old content or all of the new one, also after a power cut.

    Raises OSError if the disk does not take it; then the old content stays.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with temporary.open("w") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
