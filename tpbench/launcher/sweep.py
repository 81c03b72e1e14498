"""A sweep: which of its cells run, again or not at all, and exactly one row for each."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tpbench.launcher import resume
from tpbench.launcher.attempt import RETRIED, Attempt, Begin, Outcome, discard, forget
from tpbench.launcher.display import Display
from tpbench.launcher.locks import CellLocks
from tpbench.launcher.options import Conduct
from tpbench.launcher.plan import Cell
from tpbench.launcher.process import Terminated
from tpbench.launcher.target import PlanningTarget
from tpbench.settings import JobError


class Runner(Protocol):
    """Where and how cells run."""

    @property
    def target(self) -> PlanningTarget:
        """What the cells are planned for."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Columns of every row that are known before its job runs."""

    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        """See to what earlier sweeps left of these cells, so that nobody else writes a row of one; in words, by the
        cell's index, what is still at work and will be waited for instead of being run again."""

    def run(self, cells: Sequence[Cell], begin: Begin, display: Display) -> Iterator[Outcome]:
        """Run the cells, in an order of its own, and yield each one's outcome as soon as it has one."""


def run_sweep(cells: Sequence[Cell], folder: Path, conduct: Conduct, runner: Runner) -> list[Outcome]:
    """Run the cells; logs go to `folder`. Raises JobError if nothing could be stored, before anything runs.

    An interrupt ends the running jobs and everything they started, says how to go on, and is raised again.
    """
    output_dirs = sorted({cell.job.output_dir for cell in cells})
    for each in output_dirs:
        _require_writable(each)
    folder.mkdir(parents=True, exist_ok=True)
    claims = CellLocks(output_dirs)
    with Display(len(cells), folder) as display:
        sweep = _Sweep(cells, folder, conduct, runner, claims, display)
        try:
            sweep.run()
        except (KeyboardInterrupt, Terminated):
            display.interrupted(len(sweep.outcomes), sys.argv[1:])
            raise
        finally:
            claims.close()
        outcomes = [sweep.outcomes[cell.index] for cell in cells]
        display.end(outcomes)
    return outcomes


class _Sweep:
    def __init__(
        self,
        cells: Sequence[Cell],
        folder: Path,
        conduct: Conduct,
        runner: Runner,
        claims: CellLocks,
        display: Display,
    ) -> None:
        self.folder, self.conduct, self.runner = folder, conduct, runner
        self.claims, self.display = claims, display
        self.originals = [cell for cell in cells if cell.same_as is None]
        self.copies = [cell for cell in cells if cell.same_as is not None]
        self.outcomes: dict[int, Outcome] = {}
        self.failures: dict[int, Sequence[Mapping[str, Any]]] = {}
        """Of earlier sweeps, by the cell's index: rows that go once the cell has another."""

    def run(self) -> None:
        if not self.conduct.resume:
            for cell in self.originals:
                self.claims.acquire(cell)  # for others to see; two sweeps that measure the same on purpose both do
            self._run(self.originals)
            return
        claimed = [cell for cell in self.originals if self.claims.acquire(cell)]
        self._resume(claimed)
        for cell in self.originals:
            if cell not in claimed:  # a living sweep has it: its row will do, and if it leaves none, this one runs it
                self.display.start(cell, "runs in another sweep")
                while not self.claims.acquire(cell):
                    self.display.tick()
                    time.sleep(0.1)
                self._resume([cell])

    def _resume(self, cells: Sequence[Cell]) -> None:
        """Run those of the (claimed) cells that need it."""
        # First, so that nothing writes a row of these cells after the rows have been read.
        at_work = self.runner.recover(cells)
        verdicts = resume.decide(cells, self.runner.facts)
        verdicts |= {index: replace(verdicts[index], reason=why, row=None) for index, why in at_work.items()}
        self.failures |= {index: each.superseded for index, each in verdicts.items()}
        self.display.explain([(cell, verdicts[cell.index].row is None, verdicts[cell.index].reason) for cell in cells])
        for cell in cells:
            if (row := verdicts[cell.index].row) is not None:
                self._settle(Outcome(cell, row, verdicts[cell.index].reason))
        self._run([cell for cell in cells if verdicts[cell.index].row is None])

    def _run(self, cells: Sequence[Cell]) -> None:
        """Run the cells, and those that fail again as often as was asked for."""
        begin = functools.partial(Attempt.begin, sweep=self.folder, facts=self.runner.facts)
        for cell in cells:
            if cell.skip_reason:
                self._settle(begin(cell, tries=1).close("skipped", cell.skip_reason))
        waiting = [cell for cell in cells if not cell.skip_reason]
        failed: dict[int, Outcome] = {}

        def begin_again(cell: Cell, tries: int) -> Attempt:
            if cell.index in failed:
                forget(failed.pop(cell.index))
            return begin(cell, tries=tries)

        for tries in range(1, self.conduct.retries + 2):
            again: dict[int, Outcome] = {}
            for outcome in self.runner.run(waiting, functools.partial(begin_again, tries=tries), self.display):
                if outcome.status in RETRIED and tries <= self.conduct.retries:
                    again[outcome.cell.index] = outcome
                    self.display.retry(outcome)
                else:
                    self._settle(outcome)
            waiting, failed = [cell for cell in waiting if cell.index in again], again

    def _settle(self, outcome: Outcome) -> None:
        """The cell has its row, and so have those that are the same job."""
        self.outcomes[outcome.cell.index] = outcome
        if outcome.frame is not None:
            # Only now: killed before, the sweep leaves both rows, and the next one that resumes takes the failure's.
            for each in self.failures.pop(outcome.cell.index, ()):
                with contextlib.suppress(OSError):  # of another user, say: both stay, and reports show the measurement
                    discard(outcome.cell.job.output_dir, each)
        self.claims.release(outcome.cell)
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
