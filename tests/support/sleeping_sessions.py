"""Sessions for tests of the measurement: their steps only sleep, in simulated time."""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from tests.support.ranks import Rank
from tests.support.simulated_time import SimulatedTime
from tpbench.measure.audit import AuditedSession, Inputs
from tpbench.measure.run import Cell
from tpbench.measure.session import Context, Costs, MeasureSettings, Verdict


def cpu_context(here: Rank) -> Context:
    """The context of a rank that measures on the CPU: all ranks are one tensor-parallel group."""
    ranks = here.rank, here.world_size, here.rank, here.world_size, 0, 1
    return Context(*ranks, here.group, here.group, torch.device("cpu"))


class Sleeper(AuditedSession):
    """A session whose step takes `seconds` on rank 0, twice that on rank 1 and so on.

    Each step takes slightly longer than the one before, so that no median is known exactly.
    """

    costs = Costs(bytes_moved=10**6, bytes_communicated=0)

    def __init__(self, here: Rank, time: SimulatedTime, seconds: float, wrong: str | None = None) -> None:
        self.time, self.wrong = time, wrong
        self.audited_inputs = Inputs([])
        self.seconds = seconds * (1 + here.rank)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        self.time.sleep(self.seconds * (1 + 1e-9 * self.steps))

    def check(self) -> Verdict:
        return Verdict({"loss_value": 1.0}, self.wrong)


def run(
    session: Any,
    context: Context,
    settings: MeasureSettings,
    interpreted: bool = False,
    again: Callable[[], Any] | None = None,
) -> tuple[Verdict, dict[str, Any]]:
    """Return the result of a measurement by itself, on a machine that copies 2 GB/s.

    `again`: sets the variant up once more. None: its session serves as its own copy.
    """
    sessions = itertools.chain([session], iter(again or (lambda: session), None))
    cell = Cell(lambda: next(sessions), context, settings, 2.0, interpreted)
    cell.begin()
    verdict = cell.finish()
    return verdict, verdict.columns
