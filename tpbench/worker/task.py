"""The task of a cell: everything that its ranks must know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class Interleaving:
    """The cells with which a cell is interleaved: their rounds alternate on the same devices."""

    group: str
    """The name that the rows of all these cells have in common."""
    cells: int
    """Number of these cells, this one included. Each has its own processes and memory."""


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
    interleaving: Interleaving | None = None
    """None: the cell is measured without interruption."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the row that are known before the ranks start. The ranks copy them into the result."""

    @property
    def sharing_cells(self) -> int:
        """Number of cells that share the devices and their memory, this one included."""
        return self.interleaving.cells if self.interleaving else 1

    def with_columns(self, **columns: Any) -> Task:
        """Return the same task with more columns."""
        return replace(self, columns={**self.columns, **columns})

    def restarted(self, **columns: Any) -> Task:
        """Return the same task, starting now, with more columns."""
        return replace(self.with_columns(**columns), started_at=datetime.now(UTC))

    def result(self, status: str, reason: str | None = None, **columns: Any) -> Result:
        """Return the result of this attempt, ending now. `columns` are those known only at the end."""
        if self.interleaving:
            columns |= {"interleaved": self.interleaving.group, "interleaved_cells": self.interleaving.cells}
        return Result(self.row_id, status, reason, self.started_at, datetime.now(UTC), {**self.columns, **columns})

    def save(self, file: Path) -> None:
        """Write the task to a file, whole and durably, with absolute paths: the reader may run in another folder."""
        content = {
            "job": {**self.job.flat(), "output_dir": str(Path(self.job.output_dir).absolute())},
            "row_id": self.row_id,
            "folder": str(self.folder.absolute()),
            "started_at": self.started_at.isoformat(),
            "interleaving": [self.interleaving.group, self.interleaving.cells] if self.interleaving else None,
            "columns": dict(self.columns),
            "outside": self.job.outside.plain() if self.job.outside else None,
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
                stored_job(content["job"], OutsideVariant.from_plain(outside) if outside else None),
                content["row_id"],
                Path(content["folder"]),
                datetime.fromisoformat(content["started_at"]),
                Interleaving(*content["interleaving"]) if content["interleaving"] else None,
                content["columns"],
            )
        except JobError as error:
            raise JobError(f"{file} cannot be understood: {error}") from None
