"""One try at one cell: its folder, its row to be, and what is made of its end."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from tpbench.handover.rescue import rescued
from tpbench.handover.task import BESIDE, CellRow
from tpbench.launcher import failure
from tpbench.launcher.plan import Cell
from tpbench.results.plain import plain_rows
from tpbench.results.read import load
from tpbench.results.write import RowExists, row_exists, row_path
from tpbench.settings import JobError

FAILURES = ("error", "timeout", "wrong")
"""Statuses that make a sweep's exit code 1. Out of memory and skipped are results."""

RETRIED = ("error", "timeout")
"""Statuses that another try may change."""

GIVEN_UP = "given_up"
"""A file in the folder of a try of which nobody wants a row any more: it was cut off, or another try follows it."""


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    cell: Cell
    frame: pd.DataFrame | None
    """Its row, as `load` gives it; None of a job that was submitted and left to itself."""
    note: str | None = None
    """Why it did not have to run, or None."""
    crowded: bool = False
    """It has no row yet: memory ran out that others, with whom it took turns, had a share of."""
    sweep: Path | None = None
    """The folder of the sweep whose job it is, if that was left to itself; None of a cell with a row."""

    @functools.cached_property
    def row(self) -> dict[str, Any]:
        """Its row; what is missing is None."""
        if self.frame is None:
            return {"status": "submitted", "reason": self.note}
        (row,) = plain_rows(self.frame)
        return row

    @property
    def status(self) -> str:
        return str(self.row["status"])


@dataclass(frozen=True)
class Attempt:
    """A cell that has been given a folder and a row's name."""

    cell: Cell
    row: CellRow
    folder: Path
    """Logs of this try, and what its processes are told."""

    @classmethod
    def begin(cls, cell: Cell, sweep: Path, facts: Mapping[str, Any], tries: int) -> Attempt:
        """A try that starts now. `facts`: of the machine, for the row."""
        folder = sweep / (str(cell.index) if tries == 1 else f"{cell.index}.{tries}")
        known = {"sweep_id": sweep.name, "cell": cell.index, "tries": tries, "nodes": 1, "log_dir": str(folder)}
        return cls(cell, CellRow.begin(cell.job, **{**known, **facts}), folder)

    @classmethod
    def load(cls, folder: Path) -> Attempt:
        """The try that was begun in that folder."""
        row = CellRow.load(folder / "cell.json")
        return cls(Cell(int(row.known["cell"]), row.job, None), row, folder)

    @property
    def cell_file(self) -> Path:
        """What the workers read."""
        return self.folder / "cell.json"

    @property
    def agent_log(self) -> Path:
        """What torchrun says."""
        return self.folder / "torchrun.log"

    @property
    def has_row(self) -> bool:
        return row_exists(self.cell.job.output_dir, self.row.row_id)

    @property
    def given_up(self) -> bool:
        return (self.folder / GIVEN_UP).exists()

    def ended(self, agent_code: int | None) -> Outcome:
        """The outcome when its torchrun ended with that code, or has to be ended (None) because it takes too long."""
        if self.has_row:
            return self.close("ok", "")
        status, reason = failure.describe(agent_code, self.cell.job.timeout_s, self.agent_log, self.folder)
        if status == "oom" and self.row.sharers > 1:
            return Outcome(self.cell, None, reason, crowded=True)
        return self.close(status, reason)

    def alone(self, why: str) -> Attempt:
        """The same try from its beginning, without the cells that it took turns with. `why`: for the row."""
        folder = self.folder.with_name(f"{self.folder.name}-alone")
        folder.mkdir()
        if (self.folder / BESIDE).exists():
            shutil.copy(self.folder / BESIDE, folder)
        known = {"interleaved": None, "interleaved_cells": None, "not_interleaved": why, "log_dir": str(folder)}
        return replace(self, row=self.row.restarted(**known), folder=folder)

    def close(self, status: str, reason: str) -> Outcome:
        """The outcome by the row that a worker wrote or, if none lived to, by one that says this."""
        if not self.has_row and (file := rescued(self.row.row_id)):
            raise JobError(f"{self.cell.job.output_dir} takes no more rows; the row just measured is in {file}")
        if not self.has_row:
            try:
                self.row.write(status, reason)
            except RowExists:
                pass
            except OSError as error:
                raise JobError(f"no row can be written to {self.cell.job.output_dir}: {error.strerror}") from None
        return Outcome(self.cell, self._load())

    def _load(self) -> pd.DataFrame:
        path = row_path(self.cell.job.output_dir, self.row.row_id)
        try:
            return load(path)
        except FileNotFoundError:  # it has been merged with others
            everything = load(path.parent)
            return everything[everything["row_id"] == self.row.row_id]


Begin: TypeAlias = Callable[[Cell], Attempt]
"""Starts a try at a cell."""


def give_up(folder: Path) -> None:
    """Want no row of the try with that folder any more."""
    (folder / GIVEN_UP).touch()


def forget(outcome: Outcome) -> None:
    """Take the row of a failed try away, right before the cell is tried again: a cell has one row, the last try's.

    In this order a sweep that is killed in between leaves a cell without a row, which a resumed one runs; in the other
    it would leave a cell with two.
    """
    if outcome.frame is not None:
        discard(outcome.cell.job.output_dir, outcome.row)


def discard(output_dir: str, row: Mapping[str, Any]) -> None:
    """Take away the row of a failed try, in whose place there is or will be another.

    The try is given up first, so that nobody takes it for one that died without a row. Raises OSError where one of the
    two cannot be done: then the row stays.
    """
    path = row_path(output_dir, str(row["row_id"]))
    if not path.exists():
        return
    with contextlib.suppress(FileNotFoundError):  # its logs are gone, and with them all that a row could be made of
        give_up(Path(str(row["log_dir"])))
    path.unlink(missing_ok=True)
