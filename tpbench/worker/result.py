"""The result of a cell: everything that its row needs.

A rank writes the result, and the launching side turns it into a row. The file stays until the row is on disk, so that a
launcher that is killed, or a disk that is full, costs no measurement: `resume=true` and `scripts/collect.py` read it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tpbench.files import sync_folder

RESULT_FILE = "result.json"
"""Name of the result's file in the folder of a cell. It exists as long as the cell has a result and no row."""

RESERVED_FILE = ".result.reserved"
"""Name of the file that holds the space for the result until a rank writes it."""
UNFINISHED_FILES = ".result.*"
"""Pattern of that file and of one that a rank writes now."""
_RESERVED_BYTES = 2**20
"""Space for one result: about 50,000 samples. A longer one takes more space from the disk as it is written."""

_FAILURES_FILE = "failures.json"

ERROR = 70
"""Exit code of a rank: the job failed (EX_SOFTWARE). The result says how."""

PEER_LOST = 71
"""Exit code of a rank: a collective broke because another rank had ended. That rank is the cause."""


@dataclass(frozen=True)
class Result:
    """How a cell ended, and the columns of its row. Stored as JSON in the cell's folder."""

    row_id: str
    status: str
    """ok, oom, wrong, timeout, error or skipped."""
    reason: str | None
    """Why the status is not ok."""
    started_at: datetime
    finished_at: datetime
    columns: Mapping[str, Any]
    """All columns of the row but those above: those of the task, and those that were measured."""

    @staticmethod
    def reserve(folder: Path) -> None:
        """Reserve disk space for the result, so that a disk that fills up later cannot cost the measurement.

        Raises OSError if the disk has no space now.
        """
        with (folder / RESERVED_FILE).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)

    @staticmethod
    def release(folder: Path) -> None:
        """Return reserved space that no rank has used."""
        (folder / RESERVED_FILE).unlink(missing_ok=True)

    def save(self, folder: Path) -> None:
        """Write the result, unless another rank of the cell has begun to write one: the first one counts.

        When this returns, the file survives a power cut. Raises OSError if the disk does not take it.
        """
        temporary = folder / f".result.{os.getpid()}"
        try:
            (folder / RESERVED_FILE).rename(temporary)  # exactly one rank succeeds
        except FileNotFoundError:
            return
        content = json.dumps(
            {
                "row_id": self.row_id,
                "status": self.status,
                "reason": self.reason,
                "started_at": self.started_at.isoformat(),
                "finished_at": self.finished_at.isoformat(),
                "columns": dict(self.columns),
            },
            default=_plain,
        ).encode()
        with temporary.open("r+b") as file:
            file.write(content)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / RESULT_FILE)
        with contextlib.suppress(OSError):  # some file systems cannot flush a folder
            sync_folder(folder)

    @classmethod
    def load(cls, folder: Path) -> Result | None:
        """Read the result of a cell's folder, or return None if there is none.

        Raises ValueError for a file that `save` did not write.
        """
        try:
            content = json.loads((folder / RESULT_FILE).read_text())
        except FileNotFoundError:
            return None
        try:
            return cls(
                content["row_id"],
                content["status"],
                content["reason"],
                datetime.fromisoformat(content["started_at"]),
                datetime.fromisoformat(content["finished_at"]),
                dict(content["columns"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / RESULT_FILE} is no result: {error!r}") from None

    @staticmethod
    def remove(folder: Path) -> None:
        """Delete the result, whose row is on disk."""
        (folder / RESULT_FILE).unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """Return a numpy array or scalar as Python values."""
    return value.tolist()


class RankFailure(NamedTuple):
    """A rank that did not end with exit code 0."""

    rank: int
    local_rank: int
    exit_code: int
    """Negative: the number of the signal that killed the rank."""


def save_failures(failures: Sequence[RankFailure], folder: Path) -> None:
    """Write the failures that torchrun saw to a file in the folder of its logs."""
    (folder / _FAILURES_FILE).write_text(json.dumps(failures))


def load_failures(folder: Path) -> list[RankFailure]:
    """Read the failures of the torchrun with that log folder. Empty if it left none, or was killed as it wrote them."""
    try:
        return [RankFailure(*failure) for failure in json.loads((folder / _FAILURES_FILE).read_text())]
    except (OSError, ValueError):
        return []
