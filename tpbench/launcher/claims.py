"""What a sweep claims before it runs cells: locks on them, and the results that earlier sweeps left of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from tpbench import files
from tpbench.launcher.attempt import Attempt
from tpbench.launcher.planning.plan import Cell
from tpbench.worker.result import RESERVED_FILE, RESULT_FILE, Result


class CellLocks:
    """Locks on cells, so that sweeps that run at the same time on one output folder do not run a cell twice.

    Each lock is one byte of a hidden file, held until it is released or this process ends. All cells of an output
    folder share one file, so nothing has to be cleaned up.
    """

    def __init__(self, output_dirs: Iterable[str]) -> None:
        self._files: dict[str, int] = {}
        for output_dir in output_dirs:
            with contextlib.suppress(OSError):
                path = Path(output_dir, "rows", ".claims")
                self._files[output_dir] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def acquire(self, cell: Cell) -> bool:
        """Lock the cell. Return False if another live sweep holds its lock, and True if locks are unavailable."""
        with contextlib.suppress(KeyError, OSError):
            return files.lock(self._files[cell.job.output_dir], _byte(cell))
        return True

    def release(self, cell: Cell) -> None:
        """Unlock the cell."""
        with contextlib.suppress(KeyError, OSError):
            files.unlock(self._files[cell.job.output_dir], _byte(cell))

    def close(self) -> None:
        """Release all locks."""
        while self._files:
            os.close(self._files.popitem()[1])


def _byte(cell: Cell) -> int:
    return int(cell.job.key[:15], 16)


def store_left_results(output_dirs: Set[str], keys: Set[str]) -> None:
    """Store the results that earlier sweeps left in these output folders, of jobs with these keys, and release space.

    A launcher leaves one if it was killed, or if the disk was full. The caller holds the locks of these cells and has
    ended the processes that might still save one. Raises JobError if a row cannot be stored.
    """
    for output_dir in output_dirs:
        for attempt in _attempts_with(RESULT_FILE, output_dir):
            if attempt.cell.job.key in keys and not attempt.abandoned:
                Result.remove(attempt.folder) if attempt.crowded else attempt.close()
        for attempt in _attempts_with(RESERVED_FILE, output_dir):
            if attempt.cell.job.key in keys:
                Result.release(attempt.folder)


def _attempts_with(file_name: str, output_dir: str) -> Iterator[Attempt]:
    """Yield the attempts in an output folder that have left such a file."""
    for file in Path(output_dir, "sweeps").absolute().glob(f"*/*/{file_name}"):
        with contextlib.suppress(ValueError, OSError):  # JobError is a ValueError: a job of another version
            yield Attempt.load(file.parent).moved_to(file.parent, output_dir)
