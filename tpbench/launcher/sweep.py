"""Runs a sweep: decides which cells run, retries those that failed, and leaves exactly one row per cell."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tpbench.files import NO_SPACE
from tpbench.launcher.cells.attempt import Attempt, StartAttempt
from tpbench.launcher.cells.leftovers import discard_rows
from tpbench.launcher.cells.locks import CellLocks
from tpbench.launcher.cells.outcome import RETRIED, THROTTLE_RETRIES, Outcome
from tpbench.launcher.command_line import original_arguments
from tpbench.launcher.display import Display
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.planning import resume
from tpbench.launcher.planning.plan import Cell, PlanningTarget, ignored_notes
from tpbench.launcher.process import Terminated
from tpbench.results.compact import Busy, compact
from tpbench.settings import JobError

MERGE_AFTER_ROWS = 500
"""Rows that a sweep writes before it merges their files."""


class Runner(Protocol):
    """Runs cells: on this host, or as jobs of a cluster."""

    @property
    def target(self) -> PlanningTarget:
        """The machine that the cells are planned for."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Columns of every row that are known before its job runs."""

    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        """Store what earlier sweeps left of these cells, and end jobs that no sweep waits for.

        Afterwards only this sweep makes rows of these cells. Returns, by the cell's index, the description of a job
        that still runs: the sweep waits for it and does not start the cell again.
        """

    def run(self, cells: Sequence[Cell], begin: StartAttempt, display: Display) -> Iterator[Outcome]:
        """Run the cells in any order, and yield each outcome as soon as there is one."""


def run_sweep(cells: Sequence[Cell], folder: Path, options: SweepOptions, runner: Runner) -> list[Outcome]:
    """Run the cells; logs go to `folder`. Raises JobError before anything runs if no row could be stored.

    An interrupt ends the running jobs with all their processes, prints how to continue, and is raised again.
    """
    output_dirs = sorted({cell.job.output_dir for cell in cells})
    for each in output_dirs:
        _require_writable(each)
    folder.mkdir(parents=True, exist_ok=True)
    locks = CellLocks(output_dirs)
    with Display(len(cells), folder) as display:
        for line in ignored_notes(cells):
            display.note(line)
        sweep = _Sweep(cells, folder, options, runner, locks, display)
        try:
            sweep.run()
        except (KeyboardInterrupt, Terminated):
            display.interrupted(len(sweep.outcomes), original_arguments.get())
            raise
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            full = error.filename or ", ".join(output_dirs)
            raise JobError(
                f"{full}: {error.strerror}; {len(sweep.outcomes)} of {len(cells)} cells have their rows: free some "
                "space, then run it again with resume=true"
            ) from None
        finally:
            locks.close()
        outcomes = [sweep.outcomes[cell.index] for cell in cells]
        display.end(outcomes)
    return outcomes


class _Sweep:
    """The state of a running sweep: which cells have an outcome, and which old rows a new one replaces."""

    def __init__(
        self,
        cells: Sequence[Cell],
        folder: Path,
        options: SweepOptions,
        runner: Runner,
        locks: CellLocks,
        display: Display,
    ) -> None:
        self.folder, self.options, self.runner = folder, options, runner
        self.locks, self.display = locks, display
        self.originals = [cell for cell in cells if cell.same_as is None]
        self.copies = [cell for cell in cells if cell.same_as is not None]
        self.outcomes: dict[int, Outcome] = {}
        self.replaced: dict[int, Sequence[Mapping[str, Any]]] = {}
        """By the cell's index: rows of failed attempts, which are deleted once the cell has a new row."""
        self.rows_written = 0

    def run(self) -> None:
        if not self.options.resume:
            for cell in self.originals:
                self.locks.acquire(cell)  # for resuming sweeps to see; two sweeps may measure the same cell on purpose
            self._run(self.originals)
            return
        locked = [cell for cell in self.originals if self.locks.acquire(cell)]
        self._resume(locked)
        for cell in self.originals:
            if cell not in locked:  # another sweep runs it; if that one leaves no row, this sweep runs it
                self.display.start(cell, "runs in another sweep")
                while not self.locks.acquire(cell):
                    self.display.tick()
                    time.sleep(0.1)
                self._resume([cell])

    def _resume(self, cells: Sequence[Cell]) -> None:
        """Run those of the (locked) cells that have no valid row."""
        # Recover first, so that no row of these cells appears after the rows have been read.
        submitted = self.runner.recover(cells)
        decisions = resume.decide(cells, self.runner.facts)
        decisions |= {index: replace(decisions[index], reason=reason, row=None) for index, reason in submitted.items()}
        self.replaced |= {index: each.superseded for index, each in decisions.items()}
        self.display.print_decisions(
            [(cell, decisions[cell.index].row is None, decisions[cell.index].reason) for cell in cells]
        )
        for cell in cells:
            if (row := decisions[cell.index].row) is not None:
                self._finish(Outcome(cell, row, decisions[cell.index].reason))
        self._run([cell for cell in cells if decisions[cell.index].row is None])

    def _run(self, cells: Sequence[Cell]) -> None:
        """Run the cells, and run those again that fail or whose GPU is throttled, as often as the options allow."""
        begin = functools.partial(Attempt.begin, sweep=self.folder, facts=self.runner.facts)
        for cell in cells:
            if cell.skip_reason:
                self._finish(begin(cell, number=1).close("skipped", cell.skip_reason))
        waiting = [cell for cell in cells if not cell.skip_reason]
        failed: dict[int, Outcome] = {}

        def begin_again(cell: Cell, number: int) -> Attempt:
            # The failed attempt's row goes right before the retry: a cell has one row, the last attempt's. A sweep that
            # is killed in between leaves no row, which is resumed; the other order could leave two rows.
            if cell.index in failed and (row := failed.pop(cell.index).row):
                discard_rows(cell.job.output_dir, [row])
            return begin(cell, number=number)

        for number in range(1, max(self.options.retries, THROTTLE_RETRIES) + 2):
            again: dict[int, Outcome] = {}
            for outcome in self.runner.run(waiting, functools.partial(begin_again, number=number), self.display):
                self._count_row(outcome)
                if self._runs_again(outcome, number):
                    again[outcome.cell.index] = outcome
                    self.display.retry(outcome)
                else:
                    self._finish(outcome)
            waiting, failed = [cell for cell in waiting if cell.index in again], again

    def _runs_again(self, outcome: Outcome, number: int) -> bool:
        """Return whether a cell runs again after this outcome of its attempt with that number."""
        if outcome.status in RETRIED:
            return number <= self.options.retries
        return outcome.throttled and self.options.throttle == "retry" and number <= THROTTLE_RETRIES

    def _count_row(self, outcome: Outcome) -> None:
        """Merge the files of single rows from time to time: a folder of many files is slow to read."""
        self.rows_written += outcome.row is not None
        if self.rows_written >= MERGE_AFTER_ROWS:
            self.rows_written = 0
            with contextlib.suppress(Busy, OSError):  # the single files stay
                compact(outcome.cell.job.output_dir, single_rows_only=True)

    def _finish(self, outcome: Outcome) -> None:
        """Record the outcome of a cell, and of the cells that are the same job."""
        self.outcomes[outcome.cell.index] = outcome
        if outcome.row is not None:
            # Only now: a sweep that is killed before leaves both rows, and the next one that resumes deletes the old.
            with contextlib.suppress(OSError):  # a row of another user: both stay, and reports show the measurement
                discard_rows(outcome.cell.job.output_dir, self.replaced.pop(outcome.cell.index, ()))
        self.locks.release(outcome.cell)
        self.display.finish(outcome)
        for cell in self.copies:
            if cell.same_as == outcome.cell.index:
                self.outcomes[cell.index] = replace(outcome, cell=cell, note=f"the same job as cell {cell.same_as}")
                self.display.finish(self.outcomes[cell.index])


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
