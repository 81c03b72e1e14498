"""Which rows have moved from files of their own into a merged one: they exist, though their file does not."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path

INDEX = ".compacted"
"""In the folder of the rows: a row's name on each line. Grows only."""


def moved(rows: Path, row_id: str) -> bool:
    """Whether that row is in a merged file of this folder."""
    try:
        status = (rows / INDEX).stat()
    except OSError:
        return False
    return row_id in _names(rows / INDEX, status.st_size, status.st_mtime_ns)


def note(rows: Path, row_ids: Iterable[str]) -> None:
    """Say so, durably, before their files go."""
    with (rows / INDEX).open("a+b") as index:
        if index.tell():
            index.seek(-1, os.SEEK_END)
            if index.read(1) != b"\n":  # the last line was torn as it was written, and must not tear the next
                index.write(b"\n")
        index.write("".join(f"{each}\n" for each in row_ids).encode())
        index.flush()
        os.fsync(index.fileno())


@functools.lru_cache(maxsize=4)
def _names(index: Path, size: int, changed: int) -> frozenset[str]:
    return frozenset(index.read_text(errors="replace").split("\n"))
