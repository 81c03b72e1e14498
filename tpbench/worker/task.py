"""What launcher and ranks tell each other: the task of a cell, its result, and how far a list of tasks is.

A rank writes the result, and the launching side turns it into a row. The file stays until the row is on disk, so that a
launcher that is killed, or a disk that is full, costs no measurement: `resume=true` and `tpbench collect` read it.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from tpbench.files import replace_file, sync_folder
from tpbench.job import Job, stored_job
from tpbench.outside.variant import OutsideVariant
from tpbench.settings import JobError

TASK_FILE = "task.json"

LIST_FILE = "tasks.jsonl"
"""Name of the file with the list of tasks of a torchrun that stays. Each line is a list of task files: one task, or
tasks that are interleaved. The launcher appends a line as soon as the ranks are free."""

PROGRESS_FILE = "progress.jsonl"
"""Name of the file beside the list to which rank 0 appends what the ranks do. A number is the place, in its line of the
list, of the task that runs now. A text ends a line of the list: why the ranks run no other one; empty if they do."""

RESULT_FILE = "result.json"
"""It exists as long as the cell has a result and no row."""

RESERVED_FILE = ".result.reserved"
"""Name of the file that holds the space for the result until a rank writes it."""
UNFINISHED_FILES = ".result.*"
"""Pattern of that file and of one that a rank writes now."""
_RESERVED_BYTES = 2**20
"""Space for one result: about 50,000 samples. A longer one takes more space from the disk as it is written."""


@dataclass(frozen=True)
class Task:
    """The launcher's instructions to the ranks of one cell. Stored as JSON in the cell's folder."""

    job: Job
    row_id: str
    """Name of the row that this attempt will have."""
    folder: Path
    """The cell's folder: logs, the result, and files that a workload leaves beside them."""
    started_at: datetime
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the row that are known before the ranks start. The ranks copy them into the result."""

    def with_columns(self, **columns: Any) -> Self:
        return replace(self, columns={**self.columns, **columns})

    def result(self, status: str, reason: str | None = None, **columns: Any) -> "Result":
        """Return the result of this attempt, ending now. `columns` are those known only at the end."""
        return Result(self.row_id, status, reason, self.started_at, datetime.now(UTC), {**self.columns, **columns})

    def save(self, file: Path) -> None:
        """Write the task to a file, whole and durably, with absolute paths: the reader may run in another folder."""
        content = {
            "job": {**self.job.flat(), "output_dir": str(Path(self.job.output_dir).absolute())},
            "row_id": self.row_id,
            "folder": str(self.folder.absolute()),
            "started_at": self.started_at.isoformat(),
            "columns": dict(self.columns),
            "outside": asdict(self.job.outside) if self.job.outside else None,
        }
        replace_file(file, json.dumps(content))

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read what `save` wrote. Raises ValueError if it did not write the whole file, JobError for an unknown job."""
        content = json.loads(file.read_text())
        try:
            outside = content["outside"]
            job = stored_job(content["job"], OutsideVariant(**outside) if outside else None)
            started_at = datetime.fromisoformat(content["started_at"])
            return cls(job, content["row_id"], Path(content["folder"]), started_at, content["columns"])
        except JobError as error:
            raise JobError(f"{file} cannot be understood: {error}") from None
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} is no task: {error!r}") from None


@dataclass(frozen=True)
class Result:
    """How a cell ended, and the columns of its row. Stored as JSON in the cell's folder."""

    row_id: str
    status: str
    """ok, oom, wrong, timeout, error or skipped."""
    reason: str | None
    started_at: datetime
    finished_at: datetime
    columns: Mapping[str, Any]
    """All columns of the row but those above: those of the task, and those that were measured."""

    @staticmethod
    def reserve(folder: Path) -> None:
        """Reserve disk space for the result, so that a disk that fills up later cannot cost the measurement."""
        with (folder / RESERVED_FILE).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)

    def save(self, folder: Path) -> None:
        """Write the result durably, unless another rank of the cell has begun to: the first counts. Raises OSError."""
        temporary = folder / f".result.{os.getpid()}"
        try:
            (folder / RESERVED_FILE).rename(temporary)  # exactly one rank succeeds
        except FileNotFoundError:
            return
        with temporary.open("r+b") as file:
            file.write(json.dumps(vars(self), default=_plain).encode())
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / RESULT_FILE)
        sync_folder(folder)

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read the result in a cell's folder, if there is one. Raises ValueError if `save` did not write the file."""
        try:
            content = json.loads((folder / RESULT_FILE).read_text())
        except FileNotFoundError:
            return None
        try:
            times = {name: datetime.fromisoformat(content[name]) for name in ("started_at", "finished_at")}
            return cls(**{**content, **times})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / RESULT_FILE} is no result: {error!r}") from None

    @staticmethod
    def remove(folder: Path) -> None:
        """Delete the result, whose row is on disk, and return reserved space that no rank has used."""
        (folder / RESULT_FILE).unlink(missing_ok=True)
        (folder / RESERVED_FILE).unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """Return a time, or a numpy array or scalar, as plain values."""
    return value.isoformat() if isinstance(value, datetime) else value.tolist()


class JsonLines:
    """A file of JSON lines that one process appends, and that others read as they come."""

    def __init__(self, file: Path) -> None:
        self.file, self.position = file, 0

    def append(self, value: Any) -> None:
        with self.file.open("a") as stream:
            stream.write(f"{json.dumps(value)}\n")

    def read(self) -> list[Any]:
        """Return the values of the complete lines that were added since the last call."""
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.position)
                content = stream.read()
        except FileNotFoundError:
            return []
        complete = content[: content.rfind(b"\n") + 1]
        self.position += len(complete)
        return [json.loads(line) for line in complete.splitlines()]
