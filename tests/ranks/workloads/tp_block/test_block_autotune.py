"""The choice of a schedule by measured time, and the memory of those that were tried."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_memory

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import block_context, largest_error, problem, run_once
from tpbench.comm.parallel_linears import LocalSchedule, SequentialSchedule
from tpbench.workloads.tp_block.execution.autotune import available, prepare_fastest
from tpbench.workloads.tp_block.execution.prepared import prepare
from tpbench.workloads.tp_block.execution.torch_schedules import SymmMemSchedule
from tpbench.workloads.tp_block.problem import TOLERANCE, TpBlock

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


class PresetStopwatch:
    """A stopwatch for which the candidate of this number is fastest. It keeps the names of the clocks it was asked."""

    def __init__(self, best: int) -> None:
        self.best, self.asked = best, set[str]()

    def chained_ms(self, *timed: Any, iterations: int) -> list[list[float]]:
        return self.interleaved_ms(*timed, iterations=iterations, on_host="chained")

    def interleaved_ms(self, *timed: Any, iterations: int, on_host: Any) -> list[list[float]]:
        for run, _ in timed:
            run()
        self.asked.add({True: "wall", False: "device"}.get(on_host, on_host))
        at_best = 0 if len(timed) == 1 else self.best
        return [[0.5 if at == at_best else 1.0] * iterations for at in range(len(timed))]


def prepared(here: Rank, cell: TpBlock, best: str, variants: dict[str, Any] | None = None) -> tuple[Any, Any, Any]:
    """Prepare the block with the variant `best` being the fastest, among these or those of the machine."""
    context = block_context(here, cell)
    stopwatch: Any = PresetStopwatch(list(variants or available(context)).index(best))
    return context, prepare_fastest(cell, replace(context, stopwatch=stopwatch), variants), stopwatch


def choices(here: Rank) -> list[tuple[str, str, float]]:
    """The fastest schedule, the column, and the largest error of a block; also of a stack, without an error."""
    found = []
    for best in ("block_tp_overlap", "block_tp"):
        for cell in (problem(), problem(layers=1, rotary=True)):
            context, block, _ = prepared(here, cell, best)
            error = 0.0 if cell.layers else largest_error(cell, context, block)
            found.append((best, block.columns()["chosen"], error))
    return found


def test_the_fastest_schedule_is_chosen_for_all_linears() -> None:
    for of_rank in run_on_ranks(2, choices):
        for best, chosen, error in of_rank:
            assert chosen == best and error <= TOLERANCE["float64"]


class SharingSchedule(SequentialSchedule):
    """Plain collectives, beside memory that is shared with peers."""

    gib = 0.1875


class TorchSchedule(SymmMemSchedule):
    """Plain collectives, beside the memory of torch's operations."""

    gather_matmul, matmul_scatter = SequentialSchedule.gather_matmul, SequentialSchedule.matmul_scatter

    def __init__(self, group: dist.ProcessGroup) -> None:
        SequentialSchedule.__init__(self, group)


def held(here: Rank, best: str) -> tuple[float, int]:
    """The memory in GiB that the chosen variant reports, and how many buffers of other variants still exist."""
    cell, buffers = problem(), weakref.WeakSet[SharingSchedule]()

    def engine(problem: TpBlock, context: Any) -> Any:
        schedule = SharingSchedule(here.group)
        buffers.add(schedule)
        return prepare(context, schedule)

    variants = {
        "block_tp": lambda problem, context: prepare(context, SequentialSchedule(here.group)),
        "block_symm_mem": lambda problem, context: prepare(context, TorchSchedule(here.group)),
        "block_copy_engine": engine,
    }
    workspace = {here.group.group_name: torch.empty(2**26, dtype=torch.uint8)}  # torch never frees it
    with mock.patch.object(torch_memory, "_group_name_to_workspace_tensor", workspace):
        _, block, _ = prepared(here, cell, best, variants)
        run_once(cell, block)
        gc.collect()
        return block.columns()["workspace_gib"], len(buffers)


@pytest.mark.parametrize(
    ("best", "gib"), [("block_tp", 0.0625), ("block_copy_engine", 0.25), ("block_symm_mem", 0.0625)]
)
def test_memory_of_tried_variants_is_freed_or_reported(best: str, gib: float) -> None:
    assert run_on_ranks(2, held, best) == [(gib, int(gib == 0.25))] * 2


def clocks(here: Rank) -> dict[str, Any]:
    """Return the choice beside a variant that fails on one rank, and the clock that was asked, for each clock."""

    def fails(problem: TpBlock, context: Any) -> Any:
        if here.rank == 1:
            raise RuntimeError("no compiler")
        return prepare(context, LocalSchedule())

    variants = {"block_tp": lambda problem, context: prepare(context, SequentialSchedule(here.group)), "fails": fails}
    asked = {}
    for clock in ("wall", "device", "chained"):
        cell: Any = problem(choose_by=clock)
        _, block, stopwatch = prepared(here, cell, "block_tp", variants)
        asked[clock] = block.columns()["chosen"], stopwatch.asked
    return asked


def test_the_clock_is_the_one_that_the_user_chose() -> None:
    for asked in run_on_ranks(2, clocks):
        assert asked == {clock: ("block_tp", {clock}) for clock in ("wall", "device", "chained")}
