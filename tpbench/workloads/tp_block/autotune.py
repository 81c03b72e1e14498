"""Choose the fastest schedule of each operation by trying all of them before anything is timed.

An operation alone does not take quite the time that it takes within a step, where others ran before it and the GPU may
be at its power limit. The mixture of schedules is therefore tried as a whole step too, beside each of its schedules for
all operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from tpbench.measure.stopwatch import do_nothing
from tpbench.workloads.tp_block import isolated_operations
from tpbench.workloads.tp_block.isolated_operations import Operation
from tpbench.workloads.tp_block.prepared import BlockContext, PreparedBlock, prepare
from tpbench.workloads.tp_block.ring import RingSchedule
from tpbench.workloads.tp_block.schedule import LinearPlan, Schedule, SequentialSchedule
from tpbench.workloads.tp_block.sharded_linear import ShardedLinear

MARGIN = 0.99
"""A schedule replaces the plain one only if it takes less than this fraction of the plain time: noise is smaller."""

STEPS = 10
"""Timed iterations of each candidate for the whole step."""

PLAIN, MIXED = "plain", "mixed"


class ScheduleTuner:
    """Plans by measured time. The stopwatch returns the slowest rank's times, so that all ranks choose alike."""

    def __init__(self, context: BlockContext, schedules: Mapping[str, Schedule]) -> None:
        self.context, self.schedules = context, schedules
        self.chosen: dict[str, str] = {}
        """The name of the schedule of each operation, such as "qkv forward"."""

    def plan(self, linear: ShardedLinear) -> LinearPlan:
        """Return the fastest schedules of a linear. Collective on the first call for that linear."""
        return LinearPlan(
            self._fastest("forward", linear, isolated_operations.forward),
            self._fastest("backward", linear, isolated_operations.backward),
        )

    def choose(self) -> None:
        """Choose all schedules and free the memory of the others. Collective."""
        for linear in self.context.inputs.problem.linears:
            self.plan(linear)
        self._try_steps()
        # Symmetric buffers are freed with the last schedule that uses them. Permanent memory stays, to be counted.
        used = set(self.chosen.values())
        self.schedules = {
            name: schedule
            for name, schedule in self.schedules.items()
            if name in used or getattr(schedule, "memory_is_permanent", False)
        }

    def columns(self) -> dict[str, Any]:
        """Return the column of chosen schedules, and that of the memory that is still held, each buffer once."""
        chosen = ", ".join(f"{operation}: {name}" for operation, name in self.chosen.items())
        memories = {schedule.memory for schedule in self.schedules.values() if hasattr(schedule, "memory")}
        gib = sum(memory.gib for memory in memories)
        return {"chosen": chosen, **({"workspace_gib": gib} if gib else {})}

    def _try_steps(self) -> None:
        """Time whole steps. Replace the mixture by one schedule for all operations if that is faster."""
        names = sorted({PLAIN, *self.chosen.values()})
        if names == [PLAIN]:
            return
        candidates = {name: prepare(self.context, self.schedules[name]) for name in names}
        if len(set(self.chosen.values())) > 1:
            candidates[MIXED] = prepare(self.context, self.plan)
        best = self._best({name: partial(_step, prepared) for name, prepared in candidates.items()}, STEPS)
        if best != MIXED:
            self.chosen = dict.fromkeys(self.chosen, best)

    def _fastest(self, direction: str, linear: ShardedLinear, operation: Callable[..., Operation]) -> Schedule:
        key = f"{linear.name} {direction}"
        if key not in self.chosen:
            run = operation(self.context.inputs, linear)
            self.chosen[key] = self._best({name: partial(run, each) for name, each in self.schedules.items()})
        return self.schedules[self.chosen[key]]

    def _best(self, candidates: Mapping[str, Callable[[], None]], iterations: int | None = None) -> str:
        steps = ((run, do_nothing) for run in candidates.values())
        samples = self.context.stopwatch.interleaved_ms(*steps, iterations=iterations)
        if self.context.inputs.device.type == "cuda":
            torch.cuda.empty_cache()
        return fastest(dict(zip(candidates, map(median, samples), strict=True)))


def prepare_fastest(context: BlockContext) -> PreparedBlock:
    """Prepare the block under the fastest of this machine's schedules. Collective."""
    tuner = ScheduleTuner(context, available_schedules(context))
    tuner.choose()
    return prepare(context, tuner.plan, columns=tuner.columns)


def fastest(times_ms: Mapping[str, float]) -> str:
    """Return the name of the fastest schedule: the plain one unless another is clearly faster."""
    best = min(times_ms, key=lambda name: times_ms[name])
    return best if times_ms[best] < MARGIN * times_ms[PLAIN] else PLAIN


def available_schedules(context: BlockContext) -> dict[str, Schedule]:
    """Return the schedules that this machine can run for this problem, by name."""
    inputs, problem = context.inputs, context.inputs.problem
    schedules: dict[str, Schedule] = {PLAIN: SequentialSchedule(inputs.group)}
    if problem.tokens % inputs.size**2 == 0:
        schedules["ring"] = RingSchedule(inputs.group)
    if inputs.device.type == "cuda":
        from tpbench.comm.symmetric_buffers import SymmetricBuffers
        from tpbench.workloads.tp_block.copy_engine import CopyEngineSchedule
        from tpbench.workloads.tp_block.symm_mem import SymmMemSchedule

        buffers = SymmetricBuffers(inputs.group, inputs.device, problem.signals)
        schedules["symm_mem"] = SymmMemSchedule(inputs.group)
        schedules["copy_engine"] = CopyEngineSchedule(buffers)
        if inputs.size > 2:  # a single peer has no neighbour to merge with
            schedules["copy_engine_merged"] = CopyEngineSchedule(buffers, merged=True)
    return schedules


def _step(prepared: PreparedBlock) -> None:
    """Run one step and free its gradients."""
    prepared.run(prepared.x).backward(prepared.grad)
    prepared.x.grad = None
    prepared.module.zero_grad(set_to_none=True)
