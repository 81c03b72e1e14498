"""A cell on its way from the launcher to the worker: the job, and the part of its row that is known beforehand."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tpbench.job import Job, parse_job
from tpbench.results.schema import common_columns
from tpbench.results.write import write_row


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
            name: value for name, value in flat.items() if name in common_columns() or name in job.workload.columns
        }
        columns |= {
            "block_cap": str(flat["block_cap"]) if "block_cap" in flat else None,
            "key": job.key,
            "world_size": job.world_size,
            "interpreted": job.device == "cpu" and job.implementation.uses_triton,
            "job": json.dumps(flat, sort_keys=True),
            "started_at": started.isoformat(),
        }
        return cls(job, f"{started:%Y%m%dT%H%M%S}-{job.key}-{uuid.uuid4().hex[:6]}", {**columns, **known})

    def save(self, file: Path) -> None:
        """Write it where the worker will read it."""
        file.write_text(json.dumps({"job": self.job.flat(), **{k: v for k, v in asdict(self).items() if k != "job"}}))

    @classmethod
    def load(cls, file: Path) -> CellRow:
        """Read what `save` wrote."""
        content = json.loads(file.read_text())
        return cls(parse_job(content["job"]), content["row_id"], content["known"])

    def write(
        self, status: str, reason: str | None = None, output_dir: str | None = None, **columns: Any
    ) -> dict[str, Any]:
        """Publish the row and return it. Raises RowExists if the cell has one, OSError if it cannot be written."""
        started = datetime.fromisoformat(self.known["started_at"])
        finished = datetime.now(UTC)
        row = {**self.known, **columns, "row_id": self.row_id, "status": status, "reason": reason}
        row |= {"started_at": started, "finished_at": finished, "wall_s": (finished - started).total_seconds()}
        write_row(row, output_dir or self.job.output_dir, self.row_id)
        return row
