"""Choose the fastest schedule of each operation by trying all of them before anything is timed.

An operation alone does not take quite the time that it takes within a step, where others ran before it and the GPU may
be at its power limit. The mixture of schedules is therefore tried as a whole step too, beside each of its schedules for
all operations.

Whole steps are tried by both clocks. Overlap needs more launches than the plain schedule: on short steps the host
cannot queue them as fast as the GPU runs them, and less device time is more wall time. A candidate that loses to the
plain step by either clock is not chosen. With `try_graphs` each step is also tried with its passes captured in CUDA
graphs, which need few launches.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch

from tpbench.comm.parallel_linears import LinearPlan, LocalSchedule, Schedule, SequentialSchedule
from tpbench.comm.symmetric_buffers import SymmetricBuffers
from tpbench.measure.clock import do_nothing
from tpbench.workloads.tp_block.execution.copy_engine import CopyEngineSchedule
from tpbench.workloads.tp_block.execution.layers import Planner
from tpbench.workloads.tp_block.execution.measurements import linear_operation
from tpbench.workloads.tp_block.execution.prepared import (
    BlockContext,
    PreparedBlock,
    graphed,
    prepare,
    workspace_columns,
)
from tpbench.workloads.tp_block.execution.torch_schedules import RingSchedule, SymmMemSchedule
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import ShardedLinear, TpBlock

PLAIN, MIXED = "plain", "mixed"
DIRECTIONS = ("forward", "backward")

MIN_GAIN = 0.01
"""A schedule replaces the plain one only if it saves more than this fraction of the plain time: noise is smaller."""

MAX_LOSS = 0.004
"""A step that loses more than this fraction of the plain step's time by one clock is not chosen by the other clock."""

OPERATION_ITERATIONS = 8
"""Largest number of timed iterations of each schedule for one operation. The whole step is timed afterwards."""

STEP_ITERATIONS = 10
"""Largest number of timed iterations of each candidate for the whole step."""

LONG_STEP_MS = 50.0
"""A plain step of this length hides all launches of any candidate, so that no graph is tried."""


class Candidate(NamedTuple):
    """A way to run the whole step."""

    plan: str
    """The name of a schedule, or "mixed" for the fastest one of each operation."""
    graphs: bool = False
    """True if the forward and the backward pass are CUDA graphs."""


StepTimes: TypeAlias = tuple[float, float]
"""Median times of a step in ms, of the slowest rank: wall time and device time, which are equal on a CPU."""


def fastest(times_ms: Mapping[str, float]) -> str:
    """Return the name of the fastest schedule: the plain one unless another is clearly faster."""
    best = min(times_ms, key=lambda name: times_ms[name])
    return best if times_ms[best] < (1 - MIN_GAIN) * times_ms[PLAIN] else PLAIN


def best_step(times: Mapping[Candidate, StepTimes], plain: Candidate = Candidate(PLAIN)) -> Candidate:
    """Return the candidate with the least wall time, or else with the least device time, or else the plain one.

    Only candidates that are not slower than the plain one by either clock count. The least time must be clearly less
    than the plain one.
    """
    ratios = {
        candidate: [one / other for one, other in zip(step, times[plain], strict=True)]
        for candidate, step in times.items()
    }
    fair = [candidate for candidate, by_clock in ratios.items() if max(by_clock) <= 1 + MAX_LOSS]
    for clock in range(2):
        best = min(fair, key=lambda candidate: ratios[candidate][clock])
        if ratios[best][clock] < 1 - MIN_GAIN:
            return best
    return plain


class ScheduleTuner:
    """Plans by measured time. The stopwatch returns the slowest rank's times, so that all ranks choose alike."""

    def __init__(self, context: BlockContext, schedules: Mapping[str, Schedule]) -> None:
        """Choose among `schedules` for the blocks of `context`. Blocks of a stack are alike: one of them is tried."""
        self.context, self.schedules = context, schedules
        if context.inputs.problem.layers:
            one_block = replace(context.inputs.problem, layers=0)
            self.context = replace(context, inputs=BlockInputs(one_block, context.inputs.context))
        self.chosen: dict[str, str] = {}
        """The name of the schedule of each operation, such as "qkv forward"."""
        self.graphs = False
        """True if the passes are captured in CUDA graphs."""

    def plan(self, linear: ShardedLinear) -> LinearPlan:
        """Return the chosen schedules of a linear."""
        return LinearPlan(*(self.schedules[self.chosen[f"{linear.name} {direction}"]] for direction in DIRECTIONS))

    def choose(self) -> None:
        """Choose all schedules and free the memory of the others. Copies of a block have its schedules. Collective."""
        self.chosen, self.graphs = self.context.inputs.context.once("schedules", self._measured)
        # Symmetric buffers are freed with the last schedule that uses them. Permanent memory stays, to be counted.
        used = set(self.chosen.values())
        self.schedules = {
            name: schedule
            for name, schedule in self.schedules.items()
            if name in used or getattr(schedule, "memory_is_permanent", False)
        }

    def _measured(self) -> tuple[dict[str, str], bool]:
        for linear in self.context.inputs.problem.linears:
            for direction in DIRECTIONS:
                self.chosen[f"{linear.name} {direction}"] = self._fastest(linear, direction)
        self._try_steps()
        return self.chosen, self.graphs

    def columns(self) -> dict[str, Any]:
        """Return the column of chosen schedules, and that of the memory that is still held, each buffer once."""
        chosen = ", ".join(f"{operation}: {name}" for operation, name in self.chosen.items())
        suffix = "; forward and backward as graphs" if self.graphs else ""
        return {"chosen": chosen + suffix, **workspace_columns(self.schedules.values())}

    def _try_steps(self) -> None:
        """Time whole steps, and choose the schedules and graphs of the best one."""
        on_gpu = self.context.inputs.device.type == "cuda"
        names = sorted({PLAIN, *self.chosen.values()})
        if names == [PLAIN] and not self.context.inputs.problem.try_graphs:
            return
        if len(set(self.chosen.values())) > 1:
            names.append(MIXED)
        plans: dict[str, Planner | Schedule] = {**self.schedules, MIXED: self.plan}
        candidates = {Candidate(name): prepare(self.context, plans[name]) for name in names}
        plain = Candidate(PLAIN)
        if on_gpu and self.context.inputs.problem.try_graphs:
            if self.context.graph:  # the whole iteration will be a graph: candidates are compared as graphs, too
                candidates, plain = _graphed(candidates), Candidate(PLAIN, graphs=True)
            elif self.context.stopwatch.ms(partial(_step, candidates[plain])) < LONG_STEP_MS:
                candidates |= _graphed(candidates)
        best = best_step(self._times(candidates), plain)
        self.graphs = best.graphs and not self.context.graph
        if best.plan != MIXED:
            self.chosen = dict.fromkeys(self.chosen, best.plan)
        del candidates
        if on_gpu:  # the callables of graphs are parts of reference cycles
            gc.collect()
            torch.cuda.empty_cache()

    def _times(self, candidates: Mapping[Candidate, PreparedBlock]) -> dict[Candidate, StepTimes]:
        """The times of each candidate, all measured alternately.

        A graph of the whole iteration will leave nothing to the host: device times then stand for wall times.
        """
        steps = [(partial(_step, prepared), do_nothing) for prepared in candidates.values()]

        def medians_ms(on_host: bool) -> list[float]:
            samples = self.context.stopwatch.interleaved_ms(*steps, most=STEP_ITERATIONS, on_host=on_host)
            return list(map(median, samples))

        device = medians_ms(False)
        has_two_clocks = self.context.inputs.device.type == "cuda" and not self.context.graph
        wall = medians_ms(True) if has_two_clocks else device
        return dict(zip(candidates, zip(wall, device, strict=True), strict=True))

    def _fastest(self, linear: ShardedLinear, direction: str) -> str:
        run = linear_operation(self.context.inputs, linear, direction)
        steps = [(partial(run, schedule), do_nothing) for schedule in self.schedules.values()]
        samples = self.context.stopwatch.interleaved_ms(*steps, most=OPERATION_ITERATIONS)
        if self.context.inputs.device.type == "cuda":
            torch.cuda.empty_cache()
        return fastest(dict(zip(self.schedules, map(median, samples), strict=True)))


def _graphed(eager: Mapping[Candidate, PreparedBlock]) -> dict[Candidate, PreparedBlock]:
    """The same steps as graphs. They share the memory of their intermediate results."""
    pool = torch.cuda.graph_pool_handle()
    return {Candidate(name, True): graphed(prepared, pool) for (name, _), prepared in eager.items()}


def prepare_fastest(problem: TpBlock, context: BlockContext) -> PreparedBlock:
    """Prepare the block or the stack under the fastest of this machine's schedules. Collective."""
    tuner = ScheduleTuner(context, available_schedules(context))
    tuner.choose()
    prepared = prepare(context, tuner.plan, columns=tuner.columns)
    return graphed(prepared) if tuner.graphs else prepared


def schedule_named(name: str, inputs: BlockInputs) -> Schedule:
    """Return a new schedule of that name: local, plain, ring, symm_mem or copy_engine."""
    if name == "local":
        return LocalSchedule()
    if name == "copy_engine":
        return CopyEngineSchedule(SymmetricBuffers(inputs.group, inputs.device, inputs.problem.signals))
    return {PLAIN: SequentialSchedule, "ring": RingSchedule, "symm_mem": SymmMemSchedule}[name](inputs.group)


def available_schedules(context: BlockContext) -> dict[str, Schedule]:
    """Return the schedules that this machine can run for this problem, by name."""
    inputs = context.inputs
    names = [PLAIN, *(["ring"] if inputs.problem.tokens % inputs.size**2 == 0 else [])]
    if inputs.device.type == "cuda":
        names += ["symm_mem", "copy_engine"]
    schedules = {name: schedule_named(name, inputs) for name in names}
    engine = schedules.get("copy_engine")
    if isinstance(engine, CopyEngineSchedule) and inputs.size > 2:  # a single peer has no neighbour to merge with
        schedules["copy_engine_merged"] = CopyEngineSchedule(engine.buffers, merged=True)
    return schedules


def _step(prepared: PreparedBlock) -> None:
    """Run one step and free its gradients: other candidates need the memory."""
    prepared.step()
    prepared.free()
