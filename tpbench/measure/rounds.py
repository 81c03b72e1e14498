"""A cell's clocks in rounds, between which other cells of the same problem have theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tpbench.measure.clock import Clock
from tpbench.measure.interleaving import TurnTaker, Wants
from tpbench.measure.ranks import by_rank
from tpbench.measure.session import Context, Session
from tpbench.measure.settings import MeasureSettings
from tpbench.measure.statistics import precise_enough

ROUNDS = 24
"""What a clock's time budget is divided into."""

FEWEST_ROUNDS = 12
"""Before that many no median counts as known: they are what the interval of a ratio is made from."""

REWARM_ITERATIONS = 1
"""At the start of a round: the memory that was given back is taken again, the caches are this cell's again."""


FIRST_BLOCK = 2
"""Iterations of the first round, which tells what one costs with all that goes before it."""


class Series:
    """One clock's rounds."""

    def __init__(
        self, clock: Clock, step: Callable[[], None], session: Session, context: Context, settings: MeasureSettings
    ) -> None:
        self.clock, self.step, self.session = clock, step, session
        self.context, self.settings = context, settings
        self.rounds: list[list[np.ndarray[Any, Any]]] = []
        self.spent_s = 0.0

    @property
    def samples(self) -> list[np.ndarray[Any, Any]]:
        """Each iteration's time on every rank, in ms."""
        return [sample for block in self.rounds for sample in block]

    @property
    def medians_ms(self) -> list[float]:
        """Each round's median of the slowest rank."""
        return [float(np.median([sample.max() for sample in block])) for block in self.rounds]

    @property
    def block(self) -> int:
        """Iterations of the next round: such that about `ROUNDS` of them fill the time budget, or all iterations."""
        if not self.rounds:
            affordable = FIRST_BLOCK
        else:
            ran = len(self.samples) + REWARM_ITERATIONS * len(self.rounds)
            affordable = int(self.settings.time_budget_s / ROUNDS * ran / self.spent_s) - REWARM_ITERATIONS
        return max(1, min(affordable, self.settings.max_iterations // ROUNDS))

    def round(self, iterations: int) -> None:
        """One more. Collective."""
        began = time.monotonic()
        self.clock.samples(self.step, self.session.restore, REWARM_ITERATIONS)
        self.rounds.append(timed(self.clock, self.step, self.session, iterations, self.context))
        self.spent_s += time.monotonic() - began

    def wants(self) -> Wants:
        """The stop rule of a measurement in one go, and a number of rounds."""
        samples = self.samples
        if len(samples) + self.block > self.settings.max_iterations or self.spent_s >= self.settings.time_budget_s:
            return Wants.NO_MORE
        if len(self.rounds) < FEWEST_ROUNDS or len(samples) < self.settings.min_iterations:
            return Wants.MORE
        known = precise_enough([sample.max() for sample in samples], self.settings.precision)
        return Wants.ENOUGH if known else Wants.MORE


def timed(
    clock: Clock, step: Callable[[], None], session: Session, iterations: int, context: Context
) -> list[np.ndarray[Any, Any]]:
    """Each iteration's time on every rank, in ms. Collective."""
    return by_rank(clock.samples(step, session.restore, iterations), context)


def take_turns(turns: TurnTaker, series: Sequence[Series], session: Session, context: Context) -> None:
    """A round of each clock in each turn, until all cells know their medians. Collective."""
    while any(blocks := _next_turn(turns, series, session, context)):
        for each, block in zip(series, blocks, strict=True):
            each.round(block)


def _next_turn(turns: TurnTaker, series: Sequence[Series], session: Session, context: Context) -> list[int]:
    """The iterations of each clock's next round, 0 for none. Rank 0 asks for all, who wait in the broadcast; meanwhile
    this cell holds no memory but its inputs and, with a graph, the graph's."""
    session.release()
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
        torch.cuda.empty_cache()
    blocks = torch.zeros(len(series), dtype=torch.int64)
    if context.rank == 0:
        wants = {each.wants() for each in series}
        if turns.next(next(want for want in (Wants.NO_MORE, Wants.MORE, Wants.ENOUGH) if want in wants)):
            blocks = torch.tensor([each.block for each in series])
    dist.broadcast(blocks, src=0)
    return [int(block) for block in blocks]
