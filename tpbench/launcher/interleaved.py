"""Cells of one problem on the same devices, measured in turns: A B, B A, A B, ... so that drift hits all alike.

Each cell has processes of its own, in a warm group of its own, so that a fault costs one cell and peaks of memory are
each cell's. One after the other they are set up and checked; then each has its turn, while the others wait with
their inputs in place; then each, alone again, finishes its row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpbench.job import Job
from tpbench.launcher.attempt import Attempt, Outcome
from tpbench.launcher.plan import Cell
from tpbench.launcher.warm import WarmJob
from tpbench.measure.interleaving import FOLDER, InterleavingQueue, RoundRequest


def problem_of(job: Job) -> tuple[tuple[str, Any], ...]:
    """What cells that take turns have in common: all but the variant and the options that only some variants take."""
    own = {"variant", *(option.name for option in job.workload.options)}
    return tuple(sorted((name, value) for name, value in job.flat().items() if name not in own))


@dataclass
class Seat:
    """A cell at work."""

    job: WarmJob
    turns: InterleavingQueue | None = None
    """None of a cell that is measured alone after all."""
    left_s: float = 0.0
    """Of its timeout, while it waits: only its own turns count."""

    @property
    def wants(self) -> RoundRequest | None:
        """What it asked for, or None while it has its turn."""
        return self.turns.pending_request() if self.turns else None

    def pause(self) -> None:
        """Its turn is over."""
        self.left_s, self.job.deadline = self.job.deadline - time.monotonic(), math.inf

    def resume(self, last: bool) -> None:
        """Its turn begins."""
        assert self.turns is not None
        self.job.deadline = time.monotonic() + self.left_s
        self.turns.grant(last)


class Interleaved:
    """The cells, which begin at the first `poll`."""

    def __init__(
        self,
        cells: Sequence[Cell],
        begin: Callable[[Cell], Attempt],
        submit: Callable[[Attempt, int], WarmJob],
    ) -> None:
        """`submit` hands an attempt to the warm group with that number."""
        self.cells, self.begin, self.submit = cells, begin, submit
        self.seats: list[Seat] = []
        """Of the cells at work."""
        self.crowded: list[Attempt] = []
        """Those for which memory did not do beside the others."""
        self.schedule = self._schedule()
        self.holder: Seat | None = None
        self.over = False

    @property
    def attempts(self) -> list[Attempt]:
        """Those at work."""
        return [seat.job.attempt for seat in self.seats]

    def poll(self) -> list[Outcome]:
        """Outcomes that are new, and whose turn is next if nobody has it."""
        outcomes = []
        for seat in list(self.seats):
            if outcome := seat.job.poll():
                self.seats.remove(seat)
                if outcome.crowded:
                    self.crowded.append(seat.job.attempt)
                else:
                    outcomes.append(outcome)
        if self.holder in self.seats and self.holder is not None:
            if self.holder.wants is None:
                return outcomes
            self.holder.pause()
        self.holder = next(self.schedule, None)
        self.over = self.holder is None
        return outcomes

    def end(self) -> None:
        """End all, whatever they are doing."""
        for seat in self.seats:
            seat.job.end()

    def _schedule(self) -> Iterator[Seat]:
        """Who has the next turn, each time that nobody has it."""
        for number, cell in enumerate(self.cells):
            yield self._set_up(number, cell)
        while any(seat.wants == RoundRequest.MORE for seat in self.seats):
            order = list(self.seats)
            for seat in (*order, *reversed(order)):
                if seat in self.seats and seat.wants != RoundRequest.NO_MORE:
                    seat.resume(last=False)
                    yield seat
        for seat in list(self.seats):
            if seat in self.seats:
                seat.resume(last=True)
                yield seat
        for attempt in self.crowded:
            yield self._alone(attempt)

    def _set_up(self, number: int, cell: Cell) -> Seat:
        attempt = self.begin(cell)
        first = self.cells[0].index
        attempt.row.known.update(
            interleaved=f"{attempt.folder.parent.name}-{first}-{attempt.row.known['tries']}",
            interleaved_cells=len(self.cells),
        )
        turns = InterleavingQueue(attempt.folder / FOLDER)
        self.seats.append(Seat(self.submit(attempt, number), turns))
        return self.seats[-1]

    def _alone(self, crowded: Attempt) -> Seat:
        others = len(self.cells) - 1
        attempt = crowded.alone(f"out of memory beside {others} cell{'s' * (others > 1)} of its problem")
        self.seats.append(Seat(self.submit(attempt, self.cells.index(attempt.cell))))
        return self.seats[-1]
