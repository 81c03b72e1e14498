"""The choice of schedules by measured time, and the memory of those that were tried."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import block_context, largest_error, problem, run_once
from tpbench.comm.parallel_linears import SequentialSchedule
from tpbench.workloads.tp_block.execution import autotune
from tpbench.workloads.tp_block.execution.prepared import prepare
from tpbench.workloads.tp_block.problem import TOLERANCE

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


class PresetStopwatch:
    """A stopwatch for which one candidate is fastest: given by number for operations, and by name for whole steps."""

    def __init__(self, of_operation: Callable[[int], str], of_step: str, names: list[str]) -> None:
        self.of_operation, self.of_step, self.names = of_operation, of_step, names
        self.tried: list[int] = []

    def interleaved_ms(self, *timed: Any, most: int, on_host: bool = False) -> list[list[float]]:
        for run, _ in timed:
            run()
        if most == autotune.OPERATION_ITERATIONS:
            best = self.names.index(self.of_operation(len(self.tried)))
        else:
            best = len(timed) - 1 if self.of_step == "mixed" else ["plain", "ring"].index(self.of_step)
        self.tried.append(len(timed))
        return [[0.5 if at == best else 1.0] * 3 for at in range(len(timed))]


def choices(here: Rank) -> dict[str, tuple[dict[str, str], float]]:
    """The chosen schedules if the ring is fastest for the MLP's operations, and the largest error of the result.

    By the plan that is fastest for the whole step.
    """
    found = {}
    cell = problem()
    context = block_context(here, cell)
    for best_step in ("mixed", "ring", "plain"):
        schedules = autotune.available_schedules(context)
        stopwatch: Any = PresetStopwatch(lambda number: "ring" if number >= 4 else "plain", best_step, list(schedules))
        context.inputs.context.known.clear()  # as for another cell
        tuner = autotune.ScheduleTuner(replace(context, stopwatch=stopwatch), schedules)
        tuner.choose()
        of_operations = [len(schedules)] * 2 * len(cell.linears)
        # All schedules for an operation. For a step both and the mixture: on a GPU by two clocks.
        assert stopwatch.tried == of_operations + [3] * (2 if here.device.type == "cuda" else 1)
        assert tuner.columns()["chosen"].startswith(f"qkv forward: {tuner.chosen['qkv forward']}, ")
        found[best_step] = tuner.chosen, largest_error(cell, context, prepare(context, tuner.plan))
    return found


def test_each_operation_has_a_schedule_of_its_own_unless_one_for_all_is_faster() -> None:
    plain = {f"{linear} {direction}": "plain" for linear in ("qkv", "out") for direction in ("forward", "backward")}
    ring = {f"{linear} {direction}": "ring" for linear in ("up", "down") for direction in ("forward", "backward")}
    mixed = plain | ring
    for found in run_on_ranks(2, choices):
        for best_step, (names, error) in found.items():
            assert names == (mixed if best_step == "mixed" else dict.fromkeys(mixed, best_step))
            assert error <= TOLERANCE["float64"]


class FakeMemory:
    """Memory of a known size that schedules share with peers."""

    def __init__(self, gib: float) -> None:
        self.gib = gib


class FakeSchedule(SequentialSchedule):
    """Plain collectives, beside memory that is not used."""

    def __init__(self, group: dist.ProcessGroup, memory: FakeMemory, *, permanent: bool) -> None:
        super().__init__(group)
        self.memory, self.memory_is_permanent = memory, permanent


def held(here: Rank, best: list[str]) -> tuple[float | None, bool]:
    """The memory in GiB that a mixture of schedules reports, and whether the symmetric buffers still exist."""
    cell = problem()
    context = block_context(here, cell)
    buffers, workspace = FakeMemory(0.1875), FakeMemory(0.0625)
    schedules = {
        "plain": SequentialSchedule(here.group),
        "symm_mem": FakeSchedule(here.group, workspace, permanent=True),
        "copy_engine": FakeSchedule(here.group, buffers, permanent=False),
        "copy_engine_merged": FakeSchedule(here.group, buffers, permanent=False),
    }
    reference = weakref.ref(buffers)
    stopwatch: Any = PresetStopwatch(lambda number: best[number % len(best)], "mixed", list(schedules))
    tuner = autotune.ScheduleTuner(replace(context, stopwatch=stopwatch), schedules)
    del buffers, schedules
    tuner.choose()
    assert set(tuner.chosen.values()) == set(best)
    run_once(cell, prepare(context, tuner.plan))
    return tuner.columns().get("workspace_gib"), reference() is not None


@pytest.mark.parametrize(
    ("best", "gib", "buffers_exist"),
    [
        (["plain"], 0.0625, False),
        (["copy_engine", "copy_engine_merged"], 0.25, True),
        (["symm_mem", "copy_engine"], 0.25, True),
    ],
)
def test_memory_of_tried_schedules_is_freed_or_reported(best: list[str], gib: float, buffers_exist: bool) -> None:
    assert run_on_ranks(2, held, best) == [(gib, buffers_exist)] * 2
