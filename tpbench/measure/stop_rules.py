"""When a clock has timed enough iterations: of a cell by itself, and in rounds between those of other cells."""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum

import numpy as np

from tpbench.measure.audit import poison
from tpbench.measure.ranks import from_rank_0, gather_numbers
from tpbench.measure.session import Context, MeasureSettings, Session
from tpbench.measure.statistics import Samples, precise_enough
from tpbench.measure.timers import Timer

WARMUP_ITERATIONS, FIRST_BLOCK = 3, 5
"""Untimed iterations of a cell that is measured by itself, and those of its first block."""

ROUNDS, MIN_ROUNDS = 24, 12
"""A clock's time budget is divided into about so many rounds. No median counts as precise before `MIN_ROUNDS`: the
interval of a ratio of cells is computed from rounds."""

REWARM_ITERATIONS, FIRST_ROUND_ITERATIONS = 1, 2
"""Untimed iterations of each round, which allocate the freed memory again and fill the caches, and timed ones of the
first round, which shows the time of one iteration with its overhead."""


class RoundRequest(IntEnum):
    """A cell's request after a round. The smallest one of its clocks holds."""

    NO_MORE = 0  # its time budget or its number of iterations is used up
    MORE = 1  # its medians are not precise enough yet
    ENOUGH = 2  # it runs further rounds while other cells need more: all get equally many


def next_cells(requests: Mapping[int, RoundRequest]) -> Iterator[int]:
    """Yield the cell that runs the next round, in the order A B B A, so that drift affects all cells alike.

    `requests` has the present request of each cell. The next A B B A has another random order, equal on all ranks, so
    that no cell always follows the same other one, which may have heated or cooled the GPU.
    """
    generator, order = random.Random(0), list(requests)
    while RoundRequest.MORE in requests.values():
        generator.shuffle(order)
        for cell in (*order, *reversed(order)):
            if requests[cell] != RoundRequest.NO_MORE:
                yield cell


class ClockRun:
    """Samples of one clock: blocks of iterations of a cell by itself, or rounds between those of other cells.

    Its methods are collective, except `request`.
    """

    def __init__(
        self,
        timer: Timer,
        step: Callable[[], None],
        session: Session,
        context: Context,
        settings: MeasureSettings,
    ) -> None:
        """`step`: the step of the session, or the replay of its graph."""
        self.timer, self.step, self.session = timer, step, session
        self.context, self.settings = context, settings
        self.rounds: list[Samples] = []  # of each block or round
        self.spent_s = 0.0

    @property
    def samples(self) -> Samples:
        """The samples of all blocks or rounds."""
        return [sample for samples in self.rounds for sample in samples]

    @property
    def medians_ms(self) -> list[float]:
        """Per round the median over iterations of the slowest rank's time."""
        return [float(np.median([sample.max() for sample in samples])) for samples in self.rounds]

    def request(self, iterations: int = 1, rounds: int = 1) -> RoundRequest:
        """Apply the stop rule before so many further iterations. A median counts as precise after `rounds`."""
        samples, settings = self.samples, self.settings
        if len(samples) + iterations > settings.max_iterations or self.spent_s >= settings.time_budget_s:
            return RoundRequest.NO_MORE
        if len(self.rounds) < rounds or len(samples) < settings.min_iterations:
            return RoundRequest.MORE
        is_precise = precise_enough([sample.max() for sample in samples], settings.precision)
        return RoundRequest.ENOUGH if is_precise else RoundRequest.MORE

    def until_precise(self) -> None:
        """Time blocks of iterations, whose sizes rank 0 decides, until the median is precise enough or time is up."""
        self.timer.warm_up(self.step, self.session.restore, WARMUP_ITERATIONS)
        began = time.monotonic()
        while block := from_rank_0([self.next_block()])[0]:
            self._time(block)
            self.spent_s = time.monotonic() - began

    def next_block(self) -> int:
        """Return the iterations of the next block, 0 to stop. Each doubles the samples, within the limits."""
        count, settings = len(self.samples), self.settings
        if not count:
            return min(FIRST_BLOCK, settings.max_iterations)
        if self.request() != RoundRequest.MORE:
            return 0
        affordable = int((settings.time_budget_s - self.spent_s) / (self.spent_s / count))
        return max(1, min(settings.max_iterations - count, affordable, max(count, settings.min_iterations - count)))

    def next_round(self) -> int:
        """Return the iterations of the next round: about `ROUNDS` fill the time budget or reach the limit."""
        affordable = FIRST_ROUND_ITERATIONS
        if self.rounds:
            ran = len(self.samples) + REWARM_ITERATIONS * len(self.rounds)
            affordable = int(self.settings.time_budget_s / ROUNDS * ran / self.spent_s) - REWARM_ITERATIONS
        return max(1, min(affordable, self.settings.max_iterations // ROUNDS))

    def run_round(self, iterations: int) -> None:
        """Run one more round."""
        began = time.monotonic()
        self.timer.warm_up(self.step, self.session.restore, REWARM_ITERATIONS)
        self._time(iterations)
        self.spent_s += time.monotonic() - began

    def _time(self, iterations: int) -> None:
        calls = itertools.count(1)

        def restore() -> None:
            if next(calls) >= iterations:  # the last iteration, whose result is checked
                poison(self.session)
            self.session.restore()

        samples = self.timer.samples(self.step, restore, iterations)
        self.rounds.append(gather_numbers(samples, self.context))
