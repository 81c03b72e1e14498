"""Runs the planned cells of a sweep to exactly one row each, with a `Runner`: this host or a Slurm cluster."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpbench.launcher import interrupts
from tpbench.launcher.attempt import Attempt, discard_rows
from tpbench.launcher.command_line import arguments
from tpbench.launcher.devices import CellLocks
from tpbench.launcher.display import Display
from tpbench.launcher.interrupts import Terminated
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.planning.plan import Cell, PlanningTarget, notes
from tpbench.launcher.planning.resume import decide


class Runner(ABC):
    """The place where the cells of a sweep run. `Host` and `Slurm` implement it."""

    target: PlanningTarget
    """The host or the partition that cells are planned for."""
    facts: Mapping[str, Any]
    """Columns of the software and the hardware with which a stored row is still valid. A missing one isn't compared."""

    @abstractmethod
    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        """Store the results that earlier sweeps left of these locked cells, of which no other process stores a row now.

        Return by the index of a cell why an attempt of an earlier sweep still counts: `run` waits for its job.
        """

    @abstractmethod
    def run(self, attempts: Sequence[Attempt], display: Display) -> Iterator[Attempt]:
        """Run planned attempts, and yield the last attempt at each cell as soon as it has ended.

        Its row is on disk then, or `note` says why not. When the generator is closed, it ends all processes and jobs
        that it has started, and these store no row afterwards. Raises JobError if no cell can run, as on a full disk.
        """


def run_sweep(cells: Sequence[Cell], folder: Path, options: SweepOptions, runner: Runner) -> list[Attempt]:
    """Run the cells; logs go to `folder`. Return the last attempt at each that no other sweep took over."""
    locks = CellLocks({cell.job.output_dir for cell in cells})
    with Display(len(cells), folder) as display, interrupts.noted(display.tick):
        for line in notes(cells):
            display.note(line)
        sweep = _Sweep(cells, folder, runner, locks, display)
        try:
            sweep.run(options.resume)
        except Terminated:
            display.interrupted(len(sweep.ended), arguments.typed)
            raise
        attempts = [sweep.ended[cell.index] for cell in cells if cell.index in sweep.ended]
        display.end(attempts)
        if taken := len(cells) - len(attempts):
            display.note(f"another sweep with resume=true took over {taken} of the cells, and has their rows")
    return attempts


@dataclass
class _Sweep:
    """The state of a running sweep: which cells have ended, and which old rows a new one replaces."""

    cells: Sequence[Cell]
    folder: Path
    runner: Runner
    locks: CellLocks
    display: Display
    ended: dict[int, Attempt] = field(default_factory=dict)
    replaced: dict[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """By the cell's index: rows of failed attempts, which are deleted once the cell has a new row."""

    def run(self, resume: bool) -> None:
        """Run all cells, or those without a valid row."""
        locked = {cell.index for cell in self.cells if self.locks.acquire(cell.job)}
        if not resume:  # the locks tell resuming sweeps; two sweeps may measure the same cell on purpose
            self._run_all(self.cells)
            return
        self._run_missing([cell for cell in self.cells if cell.index in locked])
        for cell in self.cells:  # another sweep runs the others; if that one leaves no row, this sweep runs them
            if cell.index in locked:
                continue
            self.display.show(cell, "runs in another sweep")
            while not self.locks.acquire(cell.job):
                interrupts.sleep(0.1)
            self._run_missing([cell])

    def _run_missing(self, cells: Sequence[Cell]) -> None:
        """Run those of the (locked) cells that have no valid row."""
        # Recover first, so that no row of these cells appears after the rows have been read.
        submitted = self.runner.recover(cells)
        missing = []
        for cell, decision in zip(cells, decide(cells, self.runner.facts).values(), strict=True):
            if reason := submitted.get(cell.index):
                decision = replace(decision, reason=reason, row=None)
            self.replaced[cell.index] = decision.superseded
            self.display.note(f"{'runs' if decision.row is None else 'done'} {cell}: {decision.reason}")
            if decision.row is None:
                missing.append(cell)
            else:
                attempt = Attempt.plan(cell, self.folder, self.runner.facts)
                self._finish(replace(attempt, row=decision.row, note=decision.reason), quietly=True)
        self._run_all(missing)

    def _run_all(self, cells: Sequence[Cell]) -> None:
        """Run the cells that can run on the target, after rows of the others."""
        waiting = []
        for cell in cells:
            interrupts.check()
            attempt = Attempt.plan(cell, self.folder, self.runner.facts)
            if cell.skip_reason:
                self._finish(attempt.close("skipped", cell.skip_reason))
            else:
                waiting.append(attempt)
        for attempt in self.runner.run(waiting, self.display):
            self._finish(attempt)

    def _finish(self, attempt: Attempt, quietly: bool = False) -> None:
        self.ended[attempt.cell.index] = attempt
        if attempt.row is not None:
            # Only now: a sweep that is killed before leaves both rows, and the next one that resumes deletes the old.
            with contextlib.suppress(OSError):  # a row of another user: both stay, and reports show the measurement
                discard_rows(attempt.cell.job.output_dir, self.replaced.pop(attempt.cell.index, ()))
        self.locks.release(attempt.cell.job)
        self.display.finish(attempt, quietly)
