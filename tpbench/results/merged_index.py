"""Index of the rows that were merged: they exist, although their own files do not."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path

INDEX = ".compacted"
"""File in the folder of the rows, with the name of one row on each line. It only grows."""


def is_merged(rows: Path, row_id: str) -> bool:
    """Return True if that row is in a merged file of this folder."""
    try:
        status = (rows / INDEX).stat()
    except OSError:
        return False
    return row_id in _names(rows / INDEX, status.st_size, status.st_mtime_ns)


def add_to_index(rows: Path, row_ids: Iterable[str]) -> None:
    """Add rows to the index, durably, before their files are deleted."""
    with (rows / INDEX).open("a+b") as index:
        if index.tell():
            index.seek(-1, os.SEEK_END)
            if index.read(1) != b"\n":  # a crash cut the last line: end it, so that it does not spoil the next one
                index.write(b"\n")
        index.write("".join(f"{each}\n" for each in row_ids).encode())
        index.flush()
        os.fsync(index.fileno())


@functools.lru_cache(maxsize=4)
def _names(index: Path, size: int, changed: int) -> frozenset[str]:
    return frozenset(index.read_text(errors="replace").split("\n"))
