"""A sweep on this host: each cell's torchrun in turn, and exactly one row for each cell."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tpbench.cell import CellRow
from tpbench.fields import JobError
from tpbench.launcher import autopsy, resume, torchrun
from tpbench.launcher.display import Display
from tpbench.launcher.plan import Cell
from tpbench.launcher.process import ProcessTree, Terminated
from tpbench.measure import machine
from tpbench.results.plain import plain_rows
from tpbench.results.read import load
from tpbench.results.write import RowExists, row_path

RESCUE = Path(tempfile.gettempdir()) / f"tpbench-rescued-{os.getuid()}"
"""Where a worker leaves a row that the output folder would not take."""


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    cell: Cell
    frame: pd.DataFrame
    """Its row, as `load` gives it."""
    note: str | None = None
    """Why it did not have to run, or None."""

    @functools.cached_property
    def row(self) -> dict[str, Any]:
        """Its row; what is missing is None."""
        (row,) = plain_rows(self.frame)
        return row

    @property
    def status(self) -> str:
        return str(self.row["status"])


def run_sweep(cells: Sequence[Cell], folder: Path) -> list[Outcome]:
    """Run the cells in order; logs go to `folder`. Raises JobError if nothing could be stored, before anything runs.

    An interrupt ends the running job and everything it started, says how to go on, and is raised again.
    """
    for output_dir in {cell.job.output_dir for cell in cells}:
        _require_writable(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    facts = machine.facts()
    finished = resume.finished_rows(cells, facts)
    outcomes: list[Outcome] = []
    with Display(len(cells), folder) as display:
        try:
            for cell in cells:
                display.start(cell)
                outcome = _earlier(cell, outcomes, finished) or _run_cell(cell, folder, facts, display)
                outcomes.append(outcome)
                display.finish(outcome)
        except (KeyboardInterrupt, Terminated):
            display.interrupted(len(outcomes), sys.argv[1:])
            raise
        display.end(outcomes)
    return outcomes


def _earlier(cell: Cell, outcomes: Sequence[Outcome], finished: Mapping[int, pd.DataFrame]) -> Outcome | None:
    """The outcome of a cell that need not run: the same job ran before it, in this sweep or in one that it resumes."""
    if cell.same_as is not None:
        original = next(each for each in outcomes if each.cell.index == cell.same_as)
        return Outcome(cell, original.frame, f"the same job as cell {cell.same_as}")
    if cell.index in finished:
        return Outcome(cell, finished[cell.index], "measured before")
    return None


def _run_cell(cell: Cell, folder: Path, facts: Mapping[str, Any], display: Display) -> Outcome:
    logs = (folder / str(cell.index)).absolute()
    row = CellRow.begin(cell.job, sweep_id=folder.name, cell=cell.index, log_dir=str(logs), **facts)
    if cell.obstacle:
        return _close(cell, row, "skipped", cell.obstacle)
    logs.mkdir()
    cell_file, agent_log = logs / "cell.json", logs / "torchrun.log"
    line = torchrun.command(cell.job, cell_file, logs)
    row.known["command"] = " ".join(line)
    row.save(cell_file)
    tree = ProcessTree(line, torchrun.environment(cell.job, row.row_id), agent_log)
    try:
        code = tree.wait(cell.job.timeout_s, display.tick)
        if code is None and not row_path(cell.job.output_dir, row.row_id).exists():
            # Read before the end: a rank that is told to stop adds lines that say nothing of why it hung.
            return _close(cell, row, *autopsy.describe(None, cell.job.timeout_s, agent_log, logs))
    finally:
        tree.end()
    return _close(cell, row, *autopsy.describe(code, cell.job.timeout_s, agent_log, logs))


def _close(cell: Cell, row: CellRow, status: str, reason: str) -> Outcome:
    """The row that the worker wrote or, if it did not live to, one with this status."""
    path = row_path(cell.job.output_dir, row.row_id)
    rescued = row_path(RESCUE, row.row_id)
    if rescued.exists() and not path.exists():
        raise JobError(f"{cell.job.output_dir} takes no more rows; the row just measured is in {rescued}")
    if not path.exists():
        try:
            row.write(status, reason)
        except RowExists:
            pass
        except OSError as error:
            raise JobError(f"no row can be written to {cell.job.output_dir}: {error.strerror}") from None
    return Outcome(cell, load(path))


def _require_writable(output_dir: str) -> None:
    try:
        rows = Path(output_dir) / "rows"
        rows.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=rows) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise JobError(f"output_dir={output_dir} cannot be written: {error.strerror}") from None
