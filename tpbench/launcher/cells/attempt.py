"""One attempt at a cell: its folder, its task, and the row that is made of its end.

Only the launching side writes rows: the launcher, `resume=true`, `scripts/collect.py`, and the Slurm task on its node.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from tpbench.files import NO_SPACE
from tpbench.job import Job
from tpbench.launcher.cells import failure
from tpbench.launcher.cells.outcome import Outcome
from tpbench.launcher.cells.row import CONCURRENT_FILE, new_task, store
from tpbench.launcher.planning.plan import Cell
from tpbench.results.read import load_row
from tpbench.results.write import RowExists, row_exists
from tpbench.settings import JobError
from tpbench.worker.result import RESULT_FILE, Result
from tpbench.worker.task import TASK_FILE, Task

ABANDONED_FILE = "abandoned"
"""Marker file: this attempt was abandoned. It was cut off, or another attempt follows it; it must not have a row."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at a cell, with its folder."""

    cell: Cell
    task: Task
    folder: Path
    """Logs of this attempt and the task file. On a cluster each node has a folder of its own within the cell's."""

    @classmethod
    def begin(cls, cell: Cell, sweep: Path, facts: Mapping[str, Any], number: int) -> Attempt:
        """Return an attempt that starts now. `facts`: columns that describe the machine. `number` counts from 1."""
        folder = sweep / (str(cell.index) if number == 1 else f"{cell.index}.{number}")
        columns = {"sweep_id": sweep.name, "cell": cell.index, "tries": number, "nodes": 1, "log_dir": str(folder)}
        return cls(cell, new_task(cell.job, folder, **{**columns, **facts}), folder)

    @classmethod
    def load(cls, folder: Path) -> Attempt:
        """Return the attempt that was begun in that folder."""
        task = Task.load(folder / TASK_FILE)
        return cls(Cell(int(task.columns["cell"]), task.job, None), task, folder)

    def moved_to(self, folder: Path, output_dir: str) -> Attempt:
        """Return the same attempt in this folder: a user may have moved it away from a full disk."""
        job = replace(self.cell.job, output_dir=output_dir)
        task = replace(self.task, job=job, folder=folder)
        return replace(self, cell=replace(self.cell, job=job), task=task, folder=folder)

    @property
    def task_file(self) -> Path:
        return self.folder / TASK_FILE

    @property
    def agent_log(self) -> Path:
        """Output of torchrun's agent."""
        return self.folder / failure.AGENT_LOG

    @property
    def has_row(self) -> bool:
        return row_exists(self.cell.job.output_dir, self.task.row_id)

    @property
    def has_result(self) -> bool:
        """True if a rank has saved a result that is not a row yet."""
        return (self.task.folder / RESULT_FILE).exists()

    @property
    def abandoned(self) -> bool:
        return (self.task.folder / ABANDONED_FILE).exists()

    def create_folder(self) -> None:
        """Create the attempt's folder and reserve the space for its result."""
        self.folder.mkdir()
        self.reserve_result()

    def reserve_result(self) -> None:
        """Reserve disk space for the result. Raises JobError if the disk is full."""
        try:
            Result.reserve(self.task.folder)
        except OSError as error:
            raise _not_stored(self.cell.job, error) from None

    def with_columns(self, **columns: Any) -> Attempt:
        """Return the same attempt with more columns known."""
        return replace(self, task=self.task.with_columns(**columns))

    def alone(self, reason: str) -> Attempt:
        """Return the same attempt, started anew without the cells that it was interleaved with."""
        folder = self.folder.with_name(f"{self.folder.name}-alone")
        task = self.task.restarted(not_interleaved=reason, log_dir=str(folder))
        attempt = replace(self, task=replace(task, interleaving=None, folder=folder), folder=folder)
        attempt.create_folder()
        if (self.folder / CONCURRENT_FILE).exists():
            shutil.copy(self.folder / CONCURRENT_FILE, folder)
        return attempt

    def ran_beside(self, row_id: str) -> None:
        """Note that another job runs on this host at the same time."""
        with (self.task.folder / CONCURRENT_FILE).open("a") as file:
            file.write(f"{row_id}\n")

    def ended(self, agent_code: int | None) -> Outcome:
        """Return the outcome after torchrun has ended with this exit code. None: torchrun exceeds the job's timeout."""
        if self.has_row or self.has_result:
            return self.close()
        status, reason = failure.describe(agent_code, self.cell.job.timeout_s, self.agent_log, self.folder)
        if status == "oom" and self.task.sharing_cells > 1:
            Result.release(self.task.folder)
            return Outcome(self.cell, None, reason, measure_alone=True)
        return self.close(status, reason)

    def close(self, status: str = "error", reason: str | None = None) -> Outcome:
        """Store the row: of the result that a rank saved or, if there is none, with this status and reason."""
        result = self._saved_result() or self.task.result(status, reason)
        try:
            row = store(result, self.cell.job, self.task.folder)
        except RowExists:  # another process has stored it: a Slurm task on its node, or collect
            row = load_row(self.cell.job.output_dir, self.task.row_id)
            Result.remove(self.task.folder)
        except OSError as error:
            if self.has_result:
                raise JobError(
                    f"no row can be written to {self.cell.job.output_dir}: {error.strerror}; the row just measured is "
                    f"in {self.task.folder / RESULT_FILE}; free some space, then resume=true stores it"
                ) from None
            raise _not_stored(self.cell.job, error) from None
        Result.release(self.task.folder)
        return Outcome(self.cell, row)

    def _saved_result(self) -> Result | None:
        try:
            return Result.load(self.task.folder)
        except ValueError as error:
            return self.task.result("error", f"the result cannot be read: {error}")


StartAttempt: TypeAlias = Callable[[Cell], Attempt]
"""Starts an attempt at a cell."""


def _not_stored(job: Job, error: OSError) -> JobError:
    advice = "; free some space, then run it again with resume=true" if error.errno in NO_SPACE else ""
    return JobError(f"no row can be written to {job.output_dir}: {error.strerror}{advice}")
