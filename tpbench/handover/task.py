"""A cell on its way from the launcher to the worker: the job, and the part of its row that is known beforehand."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tpbench.job import Job, stored_job
from tpbench.results.schema import common_columns
from tpbench.results.write import write_row
from tpbench.settings import JobError

BESIDE = "beside"
"""A file in a cell's folder with the rows of the cells that ran at the same time: it grows while the cell runs."""


@dataclass(frozen=True)
class CellRow:
    """The row of one cell before it is known how the cell ends. Whoever knows first writes it; there is one."""

    job: Job
    row_id: str
    known: dict[str, Any]
    """Columns known beforehand."""

    @classmethod
    def begin(cls, job: Job, **known: Any) -> CellRow:
        """A new row that starts now, with all that the job says of it."""
        flat = job.flat()
        started = datetime.now(UTC)
        columns = {
            name: value for name, value in flat.items() if name in common_columns() or name in job.workload.row_columns
        }
        columns |= {
            "block_cap": str(flat["block_cap"]) if "block_cap" in flat else None,
            "key": job.key,
            "world_size": job.world_size,
            "interpreted": job.device == "cpu" and job.uses_triton,
            "job": json.dumps(flat, sort_keys=True),
            "started_at": started.isoformat(),
            **job.workload.planned_columns(job),
        }
        return cls(job, f"{started:%Y%m%dT%H%M%S}-{job.key}-{uuid.uuid4().hex[:6]}", {**columns, **known})

    def save(self, file: Path) -> None:
        """Write it where the worker will read it, and whoever looks later, in whatever folder they are."""
        job = {**self.job.flat(), "output_dir": str(Path(self.job.output_dir).absolute())}
        file.write_text(json.dumps({"job": job, "row_id": self.row_id, "known": self.known}))

    def restarted(self, **known: Any) -> CellRow:
        """The same row, of a job that starts only now and on a machine that is known only now."""
        return replace(self, known={**self.known, "started_at": datetime.now(UTC).isoformat(), **known})

    @classmethod
    def load(cls, file: Path) -> CellRow:
        """Read what `save` wrote. Raises ValueError for what is cut off, JobError for what another version wrote."""
        content = json.loads(file.read_text())
        try:
            return cls(stored_job(content["job"]), content["row_id"], content["known"])
        except JobError as error:
            raise JobError(f"{file} cannot be understood: {error}") from None

    @property
    def sharers(self) -> int:
        """Cells that share the devices and their memory with this one, itself included: those that take turns."""
        return int(self.known.get("interleaved_cells") or 1)

    def runs_beside(self, row_id: str) -> None:
        """Note, for whoever writes the row, that another job runs on this host at the same time."""
        with Path(self.known["log_dir"], BESIDE).open("a") as file:
            file.write(f"{row_id}\n")

    def _beside(self) -> str | None:
        """All that did, by their rows."""
        try:
            return " ".join(dict.fromkeys(Path(self.known.get("log_dir", ""), BESIDE).read_text().split()))
        except OSError:
            return None

    def write(
        self, status: str, reason: str | None = None, output_dir: str | None = None, **columns: Any
    ) -> dict[str, Any]:
        """Publish the row and return it. Raises RowExists if the cell has one, OSError if it cannot be written."""
        started = datetime.fromisoformat(self.known["started_at"])
        finished = max(started, datetime.now(UTC))  # a clock may be set back while a job runs
        if status == "oom" and (needed := self.job.workload.expected_memory(self.job)):
            reason = f"{reason}; {needed}"
        row = {**self.known, **columns, "row_id": self.row_id, "status": status, "reason": reason}
        row |= {"beside": self._beside()}
        row |= {"started_at": started, "finished_at": finished, "wall_s": (finished - started).total_seconds()}
        write_row(row, output_dir or self.job.output_dir, self.row_id)
        return row
