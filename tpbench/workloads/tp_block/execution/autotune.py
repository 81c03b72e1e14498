"""Choose the fastest schedule by trying a whole step under each of them before anything is timed.

Steps are tried by both clocks. Overlap needs more launches than the plain schedule: on short steps the host cannot
queue them as fast as the GPU runs them, and less device time is more wall time. A candidate that loses to the plain
step by either clock is not chosen. With `try_graphs` each step is also tried with its passes captured in CUDA graphs,
which need few launches.

A schedule of its own for each linear and pass gained nothing: in committed rows such mixtures took 0.98 to 1.05 times
the device time of the best single schedule.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from tpbench.comm.parallel_linears import LocalSchedule, Schedule, SequentialSchedule
from tpbench.comm.symmetric_buffers import SymmetricBuffers
from tpbench.measure.clock import do_nothing
from tpbench.workloads.tp_block.execution.copy_engine import CopyEngineSchedule
from tpbench.workloads.tp_block.execution.fused_schedule import FusedSchedule
from tpbench.workloads.tp_block.execution.prepared import (
    BlockContext,
    PreparedBlock,
    graphed,
    prepare,
    workspace_columns,
)
from tpbench.workloads.tp_block.execution.quack_schedule import QuackSchedule, has_quack
from tpbench.workloads.tp_block.execution.torch_schedules import RingSchedule, SymmMemSchedule
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import TpBlock

PLAIN = "plain"

MIN_GAIN = 0.01
"""A candidate replaces the plain step only if it saves more than this fraction of its time: noise is smaller."""

MAX_LOSS = 0.004
"""A step that loses more than this fraction of the plain step's time by one clock is not chosen by the other clock."""

STEP_ITERATIONS = 10
"""Largest number of timed iterations of each candidate."""

LONG_STEP_MS = 50.0
"""A plain step of this length hides all launches of any candidate, so that no graph is tried."""


class Candidate(NamedTuple):
    """A way to run the whole step."""

    schedule: str
    """The name of the schedule of all linears."""
    graphs: bool = False
    """True if the forward and the backward pass are CUDA graphs."""


def best_step(times: Mapping[Candidate, tuple[float, float]], plain: Candidate = Candidate(PLAIN)) -> Candidate:
    """Return the candidate with the least wall time, or else with the least device time, or else the plain one.

    Only candidates that are not slower than the plain one by either clock count. The least time must be clearly less
    than the plain one. `times`: by wall clock and by device clock.
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


def prepare_fastest(problem: TpBlock, context: BlockContext) -> PreparedBlock:
    """Prepare the block or the stack under the fastest of this machine's schedules. Collective."""
    schedules = available_schedules(context)
    chosen = context.inputs.context.once("schedules", partial(fastest, context, schedules))
    # Symmetric buffers are freed with the last schedule that uses them. Permanent memory stays, to be counted.
    held = [
        schedule
        for name, schedule in schedules.items()
        if name == chosen.schedule or getattr(schedule, "memory_is_permanent", False)
    ]
    text = chosen.schedule + ("; forward and backward as graphs" if chosen.graphs else "")

    def columns() -> dict[str, Any]:
        return {"chosen": text, **workspace_columns(held)}

    prepared = replace(prepare(context, schedules[chosen.schedule]), columns=columns)
    return graphed(prepared) if chosen.graphs else prepared


def fastest(context: BlockContext, schedules: Mapping[str, Schedule]) -> Candidate:
    """Time whole steps under each schedule, and return the best one. All ranks choose alike. Collective."""
    problem, on_gpu = context.inputs.problem, context.inputs.device.type == "cuda"
    if problem.layers:  # blocks of a stack are alike: one of them is tried
        context = replace(context, inputs=BlockInputs(replace(problem, layers=0), context.inputs.context))
    candidates = {Candidate(name): prepare(context, schedule) for name, schedule in schedules.items()}
    plain = Candidate(PLAIN)
    if on_gpu and problem.try_graphs:
        if context.graph:  # the whole iteration will be a graph: candidates are compared as graphs, too
            candidates, plain = _graphed(candidates), Candidate(PLAIN, graphs=True)
        elif context.stopwatch.ms(partial(_step, candidates[plain])) < LONG_STEP_MS:
            candidates |= _graphed(candidates)
    best = best_step(_times(context, candidates), plain)
    del candidates
    if on_gpu:  # the callables of graphs are parts of reference cycles
        gc.collect()
        torch.cuda.empty_cache()
    return Candidate(best.schedule, best.graphs and not context.graph)


def _times(
    context: BlockContext, candidates: Mapping[Candidate, PreparedBlock]
) -> dict[Candidate, tuple[float, float]]:
    """Median times of each candidate in ms, of the slowest rank, all measured alternately: wall and device time.

    A graph of the whole iteration will leave nothing to the host: device times then stand for wall times.
    """
    steps = [(partial(_step, prepared), do_nothing) for prepared in candidates.values()]

    def medians_ms(on_host: bool) -> list[float]:
        return list(map(median, context.stopwatch.interleaved_ms(*steps, most=STEP_ITERATIONS, on_host=on_host)))

    device = medians_ms(False)
    has_two_clocks = context.inputs.device.type == "cuda" and not context.graph
    wall = medians_ms(True) if has_two_clocks else device
    return dict(zip(candidates, zip(wall, device, strict=True), strict=True))


def _graphed(eager: Mapping[Candidate, PreparedBlock]) -> dict[Candidate, PreparedBlock]:
    """The same steps as graphs. They share the memory of their intermediate results."""
    pool = torch.cuda.graph_pool_handle()
    return {Candidate(name, True): graphed(prepared, pool) for (name, _), prepared in eager.items()}


def schedule_named(name: str, inputs: BlockInputs) -> Schedule:
    """Return a new schedule of that name: local, plain, ring, symm_mem, copy_engine, fused or quack."""
    if name == "local":
        return LocalSchedule()
    if name in ("copy_engine", "fused"):
        through_peers = FusedSchedule if name == "fused" else CopyEngineSchedule
        return through_peers(SymmetricBuffers(inputs.group, inputs.device, inputs.problem.signals))
    classes = {PLAIN: SequentialSchedule, "ring": RingSchedule, "symm_mem": SymmMemSchedule, "quack": QuackSchedule}
    return classes[name](inputs.group)


def available_schedules(context: BlockContext) -> dict[str, Schedule]:
    """Return the schedules that this machine can run for this problem, by name."""
    inputs = context.inputs
    names = [PLAIN, *(["ring"] if inputs.problem.tokens % inputs.size**2 == 0 else [])]
    if inputs.device.type == "cuda":
        names += ["symm_mem", "copy_engine", *(["quack"] if has_quack(inputs) else [])]
    schedules = {name: schedule_named(name, inputs) for name in names}
    engine = schedules.get("copy_engine")
    if isinstance(engine, CopyEngineSchedule) and inputs.size > 2:  # a single peer has no neighbour to merge with
        schedules["copy_engine_merged"] = CopyEngineSchedule(engine.buffers, merged=True)
    return schedules


def _step(prepared: PreparedBlock) -> None:
    """Run one step and free its gradients: other candidates need the memory."""
    prepared.step()
    prepared.free()
