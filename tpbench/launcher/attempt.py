"""One attempt at a cell: its folder, its task, how it ended, and the row that is made of its end.

Only the launching side writes rows: the launcher, `resume=true`, `tpbench collect`, and the Slurm task on its node. Any
of them may be killed at any time. So what other processes must know of an attempt is on disk, each fact in one file.

- `task.json`: what runs, and the name of the row. The ranks, the Slurm task and `collect` read it.
- `.result.reserved`: space for the result; without it no rank can save one. A rank turns it into `result.json`, which
  exists until the row does.
- `slurm_job`: the job that runs the attempt. It stays after its launcher, and a resumed sweep waits for it.
- `abandoned`: the attempt must not have a row, although a process of it may still live.
- The row's file, which only one process can create: the attempt has ended.

What must end with a process, even one that is killed, is a lock of the kernel (`devices`): on the cell, held by its
sweep, and on the GPUs, held by torchrun and its ranks, too.
"""

import contextlib
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from tpbench.job import Job
from tpbench.launcher.planning.plan import Cell
from tpbench.measure.machine import user_commit
from tpbench.results.read import load_row
from tpbench.results.schema import COMMON_COLUMNS, RowError, all_columns
from tpbench.results.write import RowExists, row_path, write_row
from tpbench.settings import JobError
from tpbench.worker.task import RESULT_FILE, TASK_FILE, UNFINISHED_FILES, Result, Task

ABANDONED_FILE = "abandoned"
"""Marker file: this attempt was cut off, or another one replaced it."""

JOB_FILE = "slurm_job"
"""File with the number of the Slurm job that runs the attempt. It exists until the row is stored."""

FAILURES = ("error", "timeout", "wrong")
"""Statuses that make a sweep's exit code 1. Out of memory and skipped are results."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at a cell, with its folder."""

    cell: Cell
    task: Task
    folder: Path
    """Logs of this attempt and the task file. On a cluster each node has a folder of its own within the cell's."""
    row: Mapping[str, Any] | None = None
    """The cell's row once the attempt has ended, with None for an empty column."""
    note: str | None = None
    """Why the cell has a stored row, or why it has none yet."""

    @classmethod
    def plan(cls, cell: Cell, sweep: Path, facts: Mapping[str, Any]) -> Self:
        """Return an attempt that has not begun. `facts`: columns of the machine."""
        folder = sweep / str(cell.index)
        columns = {"sweep_id": sweep.name, "cell": cell.index, "nodes": 1, "log_dir": str(folder)}
        columns |= {"overrides": cell.overrides} if cell.overrides else {}
        return cls(cell, new_task(cell.job, folder, **{**columns, **facts}), folder)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Return the attempt that was begun in that folder. Its output folder may have been moved since then."""
        task = Task.load(folder / TASK_FILE)
        if not Path(task.job.output_dir).exists():
            task = replace(task, job=replace(task.job, output_dir=str(folder.parents[2])), folder=folder)
        return cls(Cell(int(task.columns["cell"]), task.job, None), task, folder)

    @property
    def task_file(self) -> Path:
        return self.folder / TASK_FILE

    @property
    def has_row(self) -> bool:
        return row_path(self.cell.job.output_dir, self.task.row_id).is_file()

    @property
    def has_result(self) -> bool:
        return (self.task.folder / RESULT_FILE).exists()

    @property
    def abandoned(self) -> bool:
        return (self.task.folder / ABANDONED_FILE).exists()

    @property
    def status(self) -> str:
        return str(self.row["status"]) if self.row else "submitted"

    @property
    def reason(self) -> str | None:
        return self.row["reason"] if self.row else self.note

    @property
    def crowded(self) -> bool:
        """True if the result is that memory ran out beside interleaved cells: this says nothing about the cell."""
        beside_others = (self.task.columns.get("interleaved_cells") or 1) > 1
        return beside_others and (result := self._saved_result()) is not None and result.status == "oom"

    def begin(self, **columns: Any) -> Self:
        """Return the attempt as it starts now, with space for its result. Raises JobError if the disk is full."""
        task = replace(self.task.with_columns(**columns), started_at=datetime.now(UTC))
        attempt = replace(self, task=task)
        attempt.folder.mkdir(parents=True, exist_ok=True)
        try:
            Result.reserve(attempt.task.folder)
        except OSError as error:
            raise _not_stored(self.cell.job, error) from None
        return attempt

    def again(self, **columns: Any) -> Self:
        """Return the attempt without its result, to be begun once more in another folder, with more columns."""
        folder = self.task.folder
        while folder.exists():
            folder = folder.with_name(f"{folder.name}-again")
        Result.remove(self.task.folder)
        logs = folder / self.folder.relative_to(self.task.folder)
        moved = replace(self, task=replace(self.task, folder=folder), folder=logs)
        return moved.with_columns(interleaved=None, interleaved_cells=None, log_dir=str(folder), **columns)

    def with_columns(self, **columns: Any) -> Self:
        return replace(self, task=self.task.with_columns(**columns))

    def close(self, status: str = "error", reason: str | None = None) -> Self:
        """Store the row: of the result that a rank saved or, if there is none, with this status and reason."""
        result = self._saved_result() or self.task.result(status, reason)
        try:
            row = store(result, self.cell.job, self.task.folder)
        except RowError as error:  # no value of a variant may end the sweep
            Result.remove(self.task.folder)
            return self.close("error", f"the {result.status} result does not fit into a row: {error}")
        except RowExists:  # another process has stored it: a Slurm task on its node, or collect
            row = load_row(self.cell.job.output_dir, self.task.row_id)
            Result.remove(self.task.folder)
        except OSError as error:
            raise _not_stored(self.cell.job, error, self.task.folder if self.has_result else None) from None
        return replace(self, row=row)

    def _saved_result(self) -> Result | None:
        try:
            return Result.load(self.task.folder)
        except ValueError as error:
            return self.task.result("error", f"the result cannot be read: {error}")


def new_task(job: Job, folder: Path, **columns: Any) -> Task:
    """Return the task of a job that starts now, with a new row name and every column that the job determines."""
    flat, started = job.flat(), datetime.now(UTC)
    in_rows = {*COMMON_COLUMNS, *(column.name for column in job.workload.row_columns)}
    of_job = {
        **{name: value for name, value in flat.items() if name in in_rows},
        "block_cap": str(flat["block_cap"]) if "block_cap" in flat else None,
        "key": job.key,
        "world_size": job.world_size,
        "interpreted": job.interpreted,
        **job.software,
        "user_commit": user_commit(Path(job.outside.path).parent if job.outside else Path.cwd()),
        "workload_definition": json.dumps(job.workload.definition) if job.workload.definition else None,
        "job": json.dumps(flat, sort_keys=True),
        **job.workload.planned_columns(job),
    }
    row_id = f"{started:%Y%m%dT%H%M%S}-{job.key}-{uuid.uuid4().hex[:6]}"
    return Task(job, row_id, folder, started, columns={**of_job, **columns})


def store(result: Result, job: Job, folder: Path) -> dict[str, Any]:
    """Write a result's row and JSON document, and return the row. Raises RowExists, and OSError of a full disk."""
    needed = job.workload.expected_memory(job) if result.status == "oom" else ""
    finished_at = max(result.started_at, result.finished_at)  # a clock may be set back while a job runs
    row = {
        **result.columns,
        "row_id": result.row_id,
        "status": result.status,
        "reason": f"{result.reason}; {needed}" if needed else result.reason,
        "started_at": result.started_at,
        "finished_at": finished_at,
        "wall_s": (finished_at - result.started_at).total_seconds(),
    }
    write_row(row, job.output_dir, result.row_id)
    Result.remove(folder)
    (folder / JOB_FILE).unlink(missing_ok=True)  # else a row in a merged file would look lost
    row = {name: row.get(name) for name in all_columns()} | row
    if document := job.workload.document(row):
        with contextlib.suppress(OSError):  # the row has all of it
            file = Path(job.output_dir, f"{document[0]}.json")
            file.write_text(json.dumps(document[1], indent=2) + "\n", encoding="utf-8")
    return row


def discard_rows(output_dir: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Abandon failed attempts, so that no process stores their rows again, and delete these. Raises OSError."""
    for row in rows:
        folder = Path(str(row["log_dir"])).resolve()
        if folder.is_relative_to(Path(output_dir, "sweeps").resolve()):  # a hostile row may name any folder
            with contextlib.suppress(FileNotFoundError):  # without the folder no row could be made either
                abandon(folder)
                (folder / JOB_FILE).unlink(missing_ok=True)  # the job has ended, or runs other cells
        row_path(output_dir, str(row["row_id"])).unlink(missing_ok=True)


def abandon(folder: Path) -> None:
    """Mark the attempt in that folder as abandoned: it must not have a row."""
    (folder / ABANDONED_FILE).touch()


def store_left_results(output_dirs: Set[str], keys: Set[str]) -> None:
    """Store the results that killed sweeps left of jobs with these keys, locked by the caller. Raises JobError."""
    sweeps = [Path(path, "sweeps").absolute() for path in output_dirs]
    for folder in {file.parent for path in sweeps for file in path.glob("*/*/*result*")}:
        attempts = attempts_in([folder])
        if not attempts or attempts[0].cell.job.key not in keys:
            continue
        for file in folder.glob(UNFINISHED_FILES):  # a rank that still lives has no space for a result now
            file.unlink(missing_ok=True)
        if attempts[0].crowded:
            Result.remove(folder)
        elif attempts[0].has_result and not attempts[0].abandoned:
            attempts[0].close()


def attempts_in(folders: Iterable[Path]) -> list[Attempt]:
    """Return the attempts that were begun in these folders, of those that this version of tpbench understands."""
    attempts = []
    for folder in folders:
        with contextlib.suppress(ValueError, LookupError, OSError):  # cut off, so nothing ran; deleted; or foreign
            attempts.append(Attempt.load(folder))
    return attempts


def _not_stored(job: Job, error: OSError, measured: Path | None = None) -> JobError:
    kept = f"; the row just measured is in {measured / RESULT_FILE}" if measured else ""
    advice = "make room there, then the same command with resume=true goes on"
    return JobError(f"no row can be written to {job.output_dir}: {error.strerror}{kept}; {advice}")
