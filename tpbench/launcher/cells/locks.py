"""Locks on cells, so that sweeps that run at the same time on one output folder do not run a cell twice."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from tpbench.launcher.planning.plan import Cell

_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)


class CellLocks:
    """Locks on cells. Each lock is one byte of a hidden file, held until it is released or this process ends.

    The kernel drops the locks of a process that ends, however it ends. All cells of an output folder share one file,
    so nothing has to be cleaned up. Locks of this kind (`lockf`) work between the hosts of a network file system.
    """

    def __init__(self, output_dirs: Iterable[str]) -> None:
        self._files: dict[str, int] = {}
        for each in output_dirs:
            with contextlib.suppress(OSError):
                path = Path(each, "rows", ".claims")
                self._files[each] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def acquire(self, cell: Cell) -> bool:
        """Lock the cell. Return False if another live sweep holds its lock, and True if locks are unavailable."""
        return self._lock(cell, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self, cell: Cell) -> None:
        """Unlock the cell."""
        self._lock(cell, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release all locks."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _lock(self, cell: Cell, operation: int) -> bool:
        if (file := self._files.get(cell.job.output_dir)) is None:
            return True
        try:
            fcntl.lockf(file, operation, 1, int(cell.job.key[:15], 16))
        except OSError as error:
            return error.errno not in _HELD_BY_ANOTHER
        return True
