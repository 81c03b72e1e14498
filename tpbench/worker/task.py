"""The task of a cell: everything that its ranks must know. A torchrun runs a list of tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tpbench.files import replace_file
from tpbench.job import Job, stored_job
from tpbench.outside.variant import OutsideVariant
from tpbench.settings import JobError
from tpbench.worker.result import Result

TASK_FILE = "task.json"
"""Name of the task's file in the folder of a cell."""

LIST_FILE = "tasks.jsonl"
"""Name of the file with the list of tasks of a torchrun that stays. Each line is a list of task files: one task, or
tasks that are interleaved. The launcher appends a line as soon as the ranks are free."""

PROGRESS_FILE = "progress.jsonl"
"""Name of the file beside the list to which rank 0 appends what the ranks do. A number is the place, in its line of the
list, of the task that runs now. A text ends a line of the list: why the ranks run no other one; empty if they do."""


@dataclass(frozen=True)
class Task:
    """The launcher's instructions to the ranks of one cell. Stored as JSON in the cell's folder."""

    job: Job
    row_id: str
    """Name of the row that this attempt will have."""
    folder: Path
    """The cell's folder: logs, the result, and files that a workload leaves beside them."""
    started_at: datetime
    """Start of the attempt, UTC."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the row that are known before the ranks start. The ranks copy them into the result."""

    def with_columns(self, **columns: Any) -> Task:
        """Return the same task with more columns."""
        return replace(self, columns={**self.columns, **columns})

    def restarted(self, **columns: Any) -> Task:
        """Return the same task, starting now, with more columns."""
        return replace(self.with_columns(**columns), started_at=datetime.now(UTC))

    def result(self, status: str, reason: str | None = None, **columns: Any) -> Result:
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
    def load(cls, file: Path) -> Task:
        """Read what `save` wrote.

        Raises ValueError for a file that was cut off, JobError for a job that this version of tpbench does not know.
        """
        content = json.loads(file.read_text())
        outside = content.get("outside")  # a task of an older version has none
        try:
            return cls(
                stored_job(content["job"], OutsideVariant(**outside) if outside else None),
                content["row_id"],
                Path(content["folder"]),
                datetime.fromisoformat(content["started_at"]),
                content["columns"],
            )
        except JobError as error:
            raise JobError(f"{file} cannot be understood: {error}") from None


class JsonLines:
    """A file of JSON lines that one process appends, and that others read as they come."""

    def __init__(self, file: Path) -> None:
        self.file, self.position = file, 0

    def append(self, value: Any) -> None:
        """Add a line."""
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
