"""Which cells a living sweep is at work on, so that another one on the same folder can leave them to it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from tpbench.launcher.plan import Cell

_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)


class Claims:
    """A byte of a hidden file for each cell, locked as long as this process lives and has not released it.

    The kernel drops the locks with the process, however that ends, and there is one file for all cells, so nothing is
    left behind that somebody would have to clean up. Locks of this kind work between the hosts of a network
    file system.
    """

    def __init__(self, output_dirs: Iterable[str]) -> None:
        self._files: dict[str, int] = {}
        for each in output_dirs:
            with contextlib.suppress(OSError):
                path = Path(each, "rows", ".claims")
                self._files[each] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def take(self, cell: Cell) -> bool:
        """Claim the cell. False where a living sweep has it; where there are no locks, nobody does."""
        return self._lock(cell, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self, cell: Cell) -> None:
        """Let others have it."""
        self._lock(cell, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release all."""
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
