"""Remains of earlier attempts: results without a row, reserved disk space, and rows of failures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from tpbench.launcher.cells.attempt import ABANDONED_FILE, Attempt
from tpbench.results.write import row_path
from tpbench.worker.result import RESERVED_FILE, RESULT_FILE, Result


def store_left_results(output_dirs: Set[str], keys: Set[str]) -> None:
    """Store the results that earlier sweeps left in these output folders, of jobs with these keys, and release space.

    A launcher leaves one if it was killed, or if the disk was full. The caller holds the locks of these cells and has
    ended the processes that might still save one. Raises JobError if a row cannot be stored.
    """
    for output_dir in output_dirs:
        for attempt in _attempts_with(RESULT_FILE, output_dir):
            if attempt.cell.job.key in keys and not attempt.abandoned:
                attempt.close()
        for attempt in _attempts_with(RESERVED_FILE, output_dir):
            if attempt.cell.job.key in keys:
                Result.release(attempt.folder)


def _attempts_with(file_name: str, output_dir: str) -> Iterator[Attempt]:
    """Yield the attempts in an output folder that have left such a file."""
    for file in Path(output_dir, "sweeps").absolute().glob(f"*/*/{file_name}"):
        with contextlib.suppress(ValueError, OSError):  # JobError is a ValueError: a job of another version
            yield Attempt.load(file.parent).moved_to(file.parent, output_dir)


def abandon(folder: Path) -> None:
    """Mark the attempt in that folder as abandoned: it must not have a row."""
    (folder / ABANDONED_FILE).touch()


def discard_rows(output_dir: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Delete the rows of failed attempts at a cell that has, or will have, another row.

    Each attempt is abandoned first, so that no process stores a row for it again. Raises OSError if one of the two
    cannot be done: then the row stays.
    """
    for row in rows:
        path = row_path(output_dir, str(row["row_id"]))
        if path.exists():
            folder = Path(str(row["log_dir"])).resolve()
            if folder.is_relative_to(Path(output_dir, "sweeps").resolve()):  # a hostile row may name any folder
                with contextlib.suppress(FileNotFoundError):  # without the folder no row could be made either
                    abandon(folder)
            path.unlink(missing_ok=True)
