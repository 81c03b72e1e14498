"""The row of a cell: the columns that are known before its job starts, and the row that is made of the job's result."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tpbench.job import Job
from tpbench.packages import versions
from tpbench.results.schema import all_columns, common_columns
from tpbench.results.write import write_row
from tpbench.worker.result import Result
from tpbench.worker.task import Task

CONCURRENT_FILE = "beside"
"""File in a cell's folder with the rows of the cells that ran at the same time. It grows while the cell runs."""


def new_task(job: Job, folder: Path, **columns: Any) -> Task:
    """Return the task of a job that starts now, with a new row name and every column that the job determines."""
    flat = job.flat()
    started = datetime.now(UTC)
    of_job = {
        name: value for name, value in flat.items() if name in common_columns() or name in job.workload.row_columns
    }
    of_job |= {
        "block_cap": str(flat["block_cap"]) if "block_cap" in flat else None,
        "key": job.key,
        "world_size": job.world_size,
        "interpreted": job.interpreted,
        "kernels_version": job.kernels_version,
        "variant_version": job.outside.version if job.outside else None,
        "package_versions": versions(job.implementation.requires),
        "job": json.dumps(flat, sort_keys=True),
        **job.workload.planned_columns(job),
    }
    row_id = f"{started:%Y%m%dT%H%M%S}-{job.key}-{uuid.uuid4().hex[:6]}"
    return Task(job, row_id, folder, started, columns={**of_job, **columns})


def store(result: Result, job: Job, folder: Path) -> dict[str, Any]:
    """Write the row of a result and return it, with None for empty columns. Then delete the result's file.

    `folder` is the cell's. Raises RowExists if the row is there already, OSError if the disk does not take it.
    """
    reason = result.reason
    if result.status == "oom" and (needed := job.workload.expected_memory(job)):
        reason = f"{reason}; {needed}"
    finished_at = max(result.started_at, result.finished_at)  # a clock may be set back while a job runs
    row = {
        **result.columns,
        "row_id": result.row_id,
        "status": result.status,
        "reason": reason,
        "beside": _concurrent_rows(folder),
        "started_at": result.started_at,
        "finished_at": finished_at,
        "wall_s": (finished_at - result.started_at).total_seconds(),
    }
    write_row(row, job.output_dir, result.row_id)
    Result.remove(folder)
    return {name: row.get(name) for name in all_columns()} | row


def _concurrent_rows(folder: Path) -> str | None:
    """Return the rows of all cells that ran at the same time, or None."""
    try:
        return " ".join(dict.fromkeys((folder / CONCURRENT_FILE).read_text().split()))
    except OSError:
        return None
