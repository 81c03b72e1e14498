"""Interleaves the cells of one problem on the same devices in ABBA order: every second pass is reversed.

So drift affects all cells alike. Each cell has its own processes, in its own torchrun: a failure costs one cell, and
the peak memory belongs to one cell. First the cells are set up and checked, one after the other. Then they measure in
turn, while the others wait with their inputs in memory. At last each cell finishes its result, alone again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpbench.job import Job
from tpbench.launcher.cells.attempt import Attempt
from tpbench.launcher.cells.outcome import Outcome
from tpbench.launcher.host.warm import WarmJob
from tpbench.launcher.planning.plan import Cell
from tpbench.measure.interleaving import FOLDER, InterleavingQueue, RoundRequest
from tpbench.worker.task import Interleaving


def problem_of(job: Job) -> tuple[tuple[str, Any], ...]:
    """Return what interleaved cells have in common: all fields but the variant and the options of single variants."""
    own = {"variant", *(option.name for option in job.workload.options)}
    return tuple(sorted((name, value) for name, value in job.flat().items() if name not in own))


@dataclass
class InterleavedCell:
    """One running cell of several that are interleaved."""

    job: WarmJob
    rounds: InterleavingQueue | None = None
    """None for a cell that is measured alone after all."""
    left_s: float = 0.0
    """Rest of its timeout while it waits: only its own rounds count."""

    @property
    def request(self) -> RoundRequest | None:
        """Return what the cell asked for at the end of its round, or None while it measures."""
        return self.rounds.pending_request() if self.rounds else None

    def pause(self) -> None:
        """Stop the cell's clock: its round is over."""
        self.left_s, self.job.deadline = self.job.deadline - time.monotonic(), math.inf

    def resume(self, last: bool) -> None:
        """Start the cell's next round. The last one finishes the result."""
        assert self.rounds is not None
        self.job.deadline = time.monotonic() + self.left_s
        self.rounds.grant(last)


class InterleavedCells:
    """The cells of one problem. The first call of `poll` starts them."""

    def __init__(
        self,
        cells: Sequence[Cell],
        begin: Callable[[Cell], Attempt],
        submit: Callable[[Attempt, int], WarmJob],
    ) -> None:
        """`submit` runs an attempt in the reused torchrun with that number."""
        self.cells, self.begin, self.submit = cells, begin, submit
        self.running: list[InterleavedCell] = []
        self.for_later: list[Attempt] = []
        """Attempts that ran out of the shared memory, and will be measured alone."""
        self.schedule = self._schedule()
        self.active: InterleavedCell | None = None
        """The cell that measures now, while the others wait."""
        self.over = False

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts that are running."""
        return [cell.job.attempt for cell in self.running]

    def poll(self) -> list[Outcome]:
        """Return the outcomes that are new. Start the next round if no cell measures."""
        outcomes = []
        for cell in list(self.running):
            if outcome := cell.job.poll():
                self.running.remove(cell)
                if outcome.measure_alone:
                    self.for_later.append(cell.job.attempt)
                else:
                    outcomes.append(outcome)
        if self.active in self.running and self.active is not None:
            if self.active.request is None:
                return outcomes
            self.active.pause()
        self.active = next(self.schedule, None)
        self.over = self.active is None
        return outcomes

    def end(self) -> None:
        """End all cells at once."""
        for cell in self.running:
            cell.job.end()

    def _schedule(self) -> Iterator[InterleavedCell]:
        """Yield the next cell to measure, each time that none does."""
        for number, cell in enumerate(self.cells):
            yield self._set_up(number, cell)
        while any(running.request == RoundRequest.MORE for running in self.running):
            order = list(self.running)
            for running in (*order, *reversed(order)):
                if running in self.running and running.request != RoundRequest.NO_MORE:
                    running.resume(last=False)
                    yield running
        for running in list(self.running):
            if running in self.running:
                running.resume(last=True)
                yield running
        for attempt in self.for_later:
            yield self._alone(attempt)

    def _set_up(self, number: int, cell: Cell) -> InterleavedCell:
        attempt = self.begin(cell)
        group = f"{attempt.folder.parent.name}-{self.cells[0].index}-{attempt.task.columns['tries']}"
        attempt = replace(attempt, task=replace(attempt.task, interleaving=Interleaving(group, len(self.cells))))
        rounds = InterleavingQueue(attempt.folder / FOLDER)
        self.running.append(InterleavedCell(self.submit(attempt, number), rounds))
        return self.running[-1]

    def _alone(self, attempt: Attempt) -> InterleavedCell:
        others = len(self.cells) - 1
        attempt = attempt.alone(f"out of memory beside {others} cell{'s' * (others > 1)} of its problem")
        self.running.append(InterleavedCell(self.submit(attempt, self.cells.index(attempt.cell))))
        return self.running[-1]
