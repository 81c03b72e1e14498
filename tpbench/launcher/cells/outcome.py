"""How a cell ended, and which endings count as failures or are tried again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpbench.launcher.planning.plan import Cell

FAILURES = ("error", "timeout", "wrong")
"""Statuses that make a sweep's exit code 1. Out of memory and skipped are results."""

RETRIED = ("error", "timeout")
"""Statuses that another attempt may change."""

THROTTLE_RETRIES = 2
"""With throttle=retry, a cell is measured again so many times while a GPU lowers its clocks."""


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    cell: Cell
    row: Mapping[str, Any] | None
    """The cell's row, with None for an empty column. None for a cell that has no row yet."""
    note: str | None = None
    """Why the cell did not run, or why it has no row yet."""
    measure_alone: bool = False
    """True if the memory ran out that this cell shared with interleaved cells. Then it has no row yet."""
    sweep: Path | None = None
    """Folder of the sweep that submitted the job, for a job that was left to the cluster."""

    @property
    def status(self) -> str:
        return str(self.row["status"]) if self.row else "submitted"

    @property
    def throttled(self) -> bool:
        """True if a GPU lowered its clocks while the cell was measured."""
        return self.row is not None and self.row.get("throttle_reasons") not in (None, "none")

    @property
    def reason(self) -> str | None:
        """Why the status is not ok."""
        return self.row["reason"] if self.row else self.note
