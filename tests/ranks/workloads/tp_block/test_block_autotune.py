"""The choice of a schedule by measured time, and the memory of those that were tried."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import block_context, largest_error, problem, run_once
from tpbench.comm.parallel_linears import Schedule, SequentialSchedule
from tpbench.workloads.tp_block.execution import autotune
from tpbench.workloads.tp_block.problem import TOLERANCE, TpBlock

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


class PresetStopwatch:
    """A stopwatch for which the candidate of this number is fastest."""

    def __init__(self, best: int) -> None:
        self.best = best

    def interleaved_ms(self, *timed: Any, most: int, on_host: bool = False) -> list[list[float]]:
        for run, _ in timed:
            run()
        return [[0.5 if at == self.best else 1.0] * 3 for at in range(len(timed))]


def prepared(here: Rank, cell: TpBlock, best: str, schedules: dict[str, Schedule] | None = None) -> tuple[Any, Any]:
    """Prepare the block with the schedule `best` being the fastest, among these or those of the machine."""
    context = block_context(here, cell)
    schedules = schedules or autotune.available_schedules(context)
    stopwatch: Any = PresetStopwatch(list(schedules).index(best))
    with mock.patch.object(autotune, "available_schedules", lambda _: schedules):
        return context, autotune.prepare_fastest(cell, replace(context, stopwatch=stopwatch))


def choices(here: Rank) -> dict[tuple[str, int], tuple[str, float]]:
    """The column and the largest error of a block, or of the first step of a stack, by the fastest schedule."""
    found = {}
    for best in ("ring", "plain"):
        for cell in (problem(), problem(layers=1, rotary=True)):
            context, block = prepared(here, cell, best)
            error = 0.0 if cell.layers else largest_error(cell, context, block)
            found[best, cell.layers] = block.columns()["chosen"], error
    return found


def test_the_fastest_schedule_is_chosen_for_all_linears() -> None:
    for found in run_on_ranks(2, choices):
        assert len(found) == 4
        for (best, _), (chosen, error) in found.items():
            assert chosen == best and error <= TOLERANCE["float64"]


class FakeMemory:
    """Memory of a known size that schedules share with peers."""

    def __init__(self, gib: float) -> None:
        self.gib = gib


class FakeSchedule(SequentialSchedule):
    """Plain collectives, beside memory that is not used."""

    def __init__(self, group: dist.ProcessGroup, memory: FakeMemory, *, permanent: bool) -> None:
        super().__init__(group)
        self.memory, self.memory_is_permanent = memory, permanent


def held(here: Rank, best: str) -> tuple[float | None, bool]:
    """The memory in GiB that the chosen schedule reports, and whether the symmetric buffers still exist."""
    cell = problem()
    buffers, workspace = FakeMemory(0.1875), FakeMemory(0.0625)
    schedules: dict[str, Schedule] = {
        "plain": SequentialSchedule(here.group),
        "symm_mem": FakeSchedule(here.group, workspace, permanent=True),
        "copy_engine": FakeSchedule(here.group, buffers, permanent=False),
        "copy_engine_merged": FakeSchedule(here.group, buffers, permanent=False),
    }
    reference = weakref.ref(buffers)
    _, block = prepared(here, cell, best, schedules)
    del buffers, schedules
    run_once(cell, block)
    return block.columns().get("workspace_gib"), reference() is not None


@pytest.mark.parametrize(("best", "gib"), [("plain", 0.0625), ("copy_engine_merged", 0.25), ("symm_mem", 0.0625)])
def test_memory_of_tried_schedules_is_freed_or_reported(best: str, gib: float) -> None:
    assert run_on_ranks(2, held, best) == [(gib, gib == 0.25)] * 2
