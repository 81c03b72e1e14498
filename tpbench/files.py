"""Files that are whole and survive a power cut, or do not exist."""

import errno
import os
from pathlib import Path


def explained(error: Exception) -> str:
    """Return an error as one line. Of files, the line says what it usually means if it names none."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None and isinstance(error, FileNotFoundError):
        return "the working folder was deleted: change to another one"
    return f"{error.filename or 'the output cannot be written'}: {error.strerror}"


def replace_file(file: Path, content: str | bytes) -> None:
    """Write a file. A reader sees the old content or all of the new one, also after a power cut.

    Raises OSError if the disk does not take it; then the old content stays.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        write_durably(temporary, content)
        temporary.rename(file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(file.parent)


def write_durably(file: Path, content: str | bytes) -> None:
    """Write a file in place. When this returns, its content survives a power cut; its name needs `sync_folder`."""
    with file.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
