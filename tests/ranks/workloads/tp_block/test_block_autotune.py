"""The choice of schedules by measured time, and the memory of those that were tried."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import block_context, largest_error, problem, run_once
from tpbench.comm.parallel_linears import SequentialSchedule
from tpbench.workloads.tp_block.execution import autotune
from tpbench.workloads.tp_block.execution.prepared import prepare
from tpbench.workloads.tp_block.execution.symm_mem import SymmMemSchedule, TorchWorkspace
from tpbench.workloads.tp_block.limits import TOLERANCE

needs_ranks = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


class PresetStopwatch:
    """A stopwatch for which one candidate is fastest: given by number for operations, and by name for whole steps."""

    def __init__(self, of_operation: Callable[[int], str], of_step: str, names: list[str]) -> None:
        self.of_operation, self.of_step, self.names = of_operation, of_step, names
        self.tried: list[int] = []

    def interleaved_ms(self, *timed: Any, most: int | None = None, on_host: bool = False) -> list[list[float]]:
        for run, _ in timed:
            run()
        if most == autotune.OPERATION_ITERATIONS:
            best = self.names.index(self.of_operation(len(self.tried)))
        else:
            best = len(timed) - 1 if self.of_step == "mixed" else ["plain", "ring"].index(self.of_step)
        self.tried.append(len(timed))
        return [[0.5 if at == best else 1.0] * 3 for at in range(len(timed))]


def chosen(here: Rank, best_step: str) -> tuple[dict[str, str], float]:
    """The chosen schedules if the ring is fastest for the MLP's operations, and the largest error of the result."""
    cell = problem()
    where = block_context(here, cell)
    schedules = autotune.available_schedules(where)
    stopwatch: Any = PresetStopwatch(lambda number: "ring" if number >= 4 else "plain", best_step, list(schedules))
    tuner = autotune.ScheduleTuner(replace(where, stopwatch=stopwatch), schedules)
    tuner.choose()
    error = largest_error(cell, where, prepare(where, tuner.plan))
    of_operations = [len(schedules)] * 2 * len(cell.linears)
    assert stopwatch.tried == [*of_operations, 3], "all schedules for each operation; both and the mixture for a step"
    assert tuner.columns()["chosen"].startswith(f"qkv forward: {tuner.chosen['qkv forward']}, ")
    return tuner.chosen, error


@needs_ranks
@pytest.mark.parametrize("best_step", ["mixed", "ring", "plain"])
def test_each_operation_has_a_schedule_of_its_own_unless_one_for_all_is_faster(best_step: str) -> None:
    for names, error in run_on_ranks(2, chosen, best_step):
        plain = {f"{linear} {direction}": "plain" for linear in ("qkv", "out") for direction in ("forward", "backward")}
        ring = {f"{linear} {direction}": "ring" for linear in ("up", "down") for direction in ("forward", "backward")}
        mixed = plain | ring
        assert names == (mixed if best_step == "mixed" else dict.fromkeys(mixed, best_step))
        assert error <= TOLERANCE["float64"]


class FakeBuffers:
    """Symmetric buffers of a known size."""

    gib = 0.1875


class FakeSymmMem(SymmMemSchedule):
    """Plain collectives with torch's workspace."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        SequentialSchedule.__init__(self, group)
        self.memory = TorchWorkspace(group.group_name)

    gather_matmul, matmul_scatter = SequentialSchedule.gather_matmul, SequentialSchedule.matmul_scatter


class FakeEngine(SequentialSchedule):
    """Plain collectives with symmetric buffers."""

    def __init__(self, group: dist.ProcessGroup, buffers: FakeBuffers) -> None:
        super().__init__(group)
        self.memory = buffers


def held(here: Rank, best: list[str]) -> tuple[float | None, bool]:
    """The memory in GiB that a mixture of schedules reports, and whether the symmetric buffers still exist."""
    cell = problem()
    where = block_context(here, cell)
    buffers = FakeBuffers()
    schedules = {
        "plain": SequentialSchedule(here.group),
        "symm_mem": FakeSymmMem(here.group),
        "copy_engine": FakeEngine(here.group, buffers),
        "copy_engine_merged": FakeEngine(here.group, buffers),
    }
    reference = weakref.ref(buffers)
    stopwatch: Any = PresetStopwatch(lambda number: best[number % len(best)], "mixed", list(schedules))
    tuner = autotune.ScheduleTuner(replace(where, stopwatch=stopwatch), schedules)
    del buffers, schedules
    library: Any = importlib.import_module("torch.distributed._symmetric_memory")
    workspace = torch.zeros(2**20, dtype=torch.uint8).expand(64, -1)  # nbytes as of 64 MiB
    with mock.patch.dict(library._group_name_to_workspace_tensor, {here.group.group_name: workspace}):
        tuner.choose()
        assert set(tuner.chosen.values()) == set(best)
        run_once(cell, prepare(where, tuner.plan))
        return tuner.columns().get("workspace_gib"), reference() is not None


@needs_ranks
@pytest.mark.parametrize(
    ("best", "gib", "buffers_exist"),
    [
        (["plain"], 0.0625, False),
        (["symm_mem"], 0.0625, False),
        (["copy_engine", "copy_engine_merged"], 0.25, True),
        (["symm_mem", "copy_engine"], 0.25, True),
    ],
)
def test_memory_of_tried_schedules_is_freed_or_reported(best: list[str], gib: float, buffers_exist: bool) -> None:
    assert run_on_ranks(2, held, best) == [(gib, buffers_exist)] * 2
