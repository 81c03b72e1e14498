"""Choose the fastest variant by trying a whole step under each of them before anything is timed.

Every variant whose ranks share the block is a candidate, so that a new one in `workload` is tried without a line here.
Overlap needs more launches than the plain schedule: on short steps the host cannot queue them as fast as the GPU runs
them, and less device time is more wall time. Therefore the clock is an option, `choose_by`. With `try_graphs` each step
is also tried with its passes captured in CUDA graphs, which need few launches.

A schedule of its own for each linear and pass gained nothing: in committed rows such mixtures took 0.98 to 1.05 times
the device time of the best single schedule.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch

from tpbench import packages
from tpbench.measure.ranks import on_any_rank
from tpbench.measure.statistics import median_interval
from tpbench.measure.timers import LEAST_ITERATIONS, do_nothing
from tpbench.workloads.tp_block.execution.prepared import BlockContext, PreparedBlock, graphed
from tpbench.workloads.tp_block.execution.torch_schedules import SymmMemSchedule, torch_workspace_gib
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import TpBlock
from tpbench.workloads.tp_block.workload import WORKLOAD, traits_of

Preparation: TypeAlias = Callable[[TpBlock, BlockContext], PreparedBlock]

SLOWER = 1.1
"""Candidates that take this many times as long as the fastest of a first look are not timed further."""

ITERATIONS = 20
"""Least timed iterations of each of the others. For steps of some ms a difference of half a percent is then certain."""

TRIAL_MS = 50.0
"""Short steps, whose times scatter more, are timed for about so long, but at most `MOST_ITERATIONS` times."""

MOST_ITERATIONS = 200

LONG_STEP_MS = 50.0
"""A plain step of this length hides all launches of any candidate, so that no graph is tried."""


class Candidate(NamedTuple):
    """A way to run the whole step."""

    variant: str
    graphs: bool = False
    """True if the forward and the backward pass are CUDA graphs."""


def best_step(times: Mapping[Candidate, Sequence[float]]) -> Candidate:
    """Return the first candidate that is not surely slower than the fastest one: the 95% interval of the median
    difference of paired times includes a tie.

    `times`: of iterations that were timed alternately, the simplest candidate first.
    """
    fastest = min(times, key=lambda candidate: median(times[candidate]))
    for candidate, samples in times.items():
        interval = median_interval([one - other for one, other in zip(samples, times[fastest], strict=True)])
        if interval is None or interval[0] <= 0:
            return candidate
    return fastest


def prepare_fastest(
    problem: TpBlock, context: BlockContext, variants: Mapping[str, Preparation] | None = None
) -> PreparedBlock:
    """Prepare the block or the stack as the fastest variant does. Collective.

    `variants`: what prepares the block, by name, the simplest first. None: those that can run here.
    """
    variants = variants or available(context)
    chosen: Candidate = context.inputs.context.once("chosen", partial(fastest, context, variants))
    prepared = variants[chosen.variant](problem, context)
    text = chosen.variant + ("; forward and backward as graphs" if chosen.graphs else "")

    def columns() -> dict[str, Any]:
        of_prepared = prepared.columns()
        gib = of_prepared.get("workspace_gib", 0.0)
        if not isinstance(prepared.schedule, SymmMemSchedule):
            gib += torch_workspace_gib(context.inputs.group)  # torch keeps it; the other candidates have freed theirs
        return {**of_prepared, "chosen": text, **({"workspace_gib": gib} if gib else {})}

    prepared_with_columns = replace(prepared, columns=columns)
    return graphed(prepared_with_columns) if chosen.graphs else prepared_with_columns


def available(context: BlockContext) -> dict[str, Preparation]:
    """Return what prepares this problem on this machine, by name, the plain variant first: every variant that shares
    the block between ranks."""
    problem, size, on_gpu = context.inputs.problem, context.inputs.size, context.inputs.device.type == "cuda"
    variants = sorted(map(traits_of, WORKLOAD.variants), key=lambda variant: not variant.is_plain)
    return {
        variant.name: variant.prepare
        for variant in variants
        if variant.shares_block
        and not variant.is_choice
        and variant.unsupported_reason(problem, size) is None
        and not packages.missing(variant.requires)
        and (on_gpu or not variant.requires_cuda)
    }


def fastest(context: BlockContext, variants: Mapping[str, Preparation]) -> Candidate:
    """Time whole steps of each variant, and return the best one. All ranks choose alike. Collective."""
    began, on_gpu = time.perf_counter(), context.inputs.device.type == "cuda"
    if context.inputs.problem.layers:  # blocks of a stack are alike: one of them is tried
        one_block = replace(context.inputs.problem, layers=0)
        context = replace(context, inputs=BlockInputs(one_block, context.inputs.context))
    problem, say = context.inputs.problem, context.inputs.context.say
    made = {Candidate(name): partial(prepare, problem, context) for name, prepare in variants.items()}
    candidates = _that_run(context, made)
    plain = partial(_step, next(iter(candidates.values())))
    if on_gpu and (context.graph or (problem.try_graphs and context.stopwatch.ms(plain) < LONG_STEP_MS)):
        pool = torch.cuda.graph_pool_handle()  # of all graphs' intermediate results
        made = {Candidate(name, True): partial(graphed, block, pool) for (name, _), block in candidates.items()}
        # If the whole iteration will be a graph, candidates are compared as graphs, too.
        candidates = ({} if context.graph else candidates) | _that_run(context, made)
    best, count = best_step(_times(context, candidates)), len(candidates)
    del candidates, made, plain
    if on_gpu:  # the callables of graphs are parts of reference cycles
        gc.collect()
        torch.cuda.empty_cache()
    say(f"tried {count} steps in {time.perf_counter() - began:.1f} s, and chose {best.variant}")
    return Candidate(best.variant, best.graphs and not context.graph)


def _that_run(
    context: BlockContext, made: Mapping[Candidate, Callable[[], PreparedBlock]]
) -> dict[Candidate, PreparedBlock]:
    """Return the candidates that run a step on every rank. A compiler may be missing, or memory."""
    blocks = {}
    for candidate, make in made.items():
        failure = None
        try:
            blocks[candidate] = make()
            _step(blocks[candidate])
        except Exception as error:  # without the candidate the others can still be measured
            failure = f"the trial leaves out {candidate.variant}: {type(error).__name__}: {error}"
            context.inputs.context.say(failure)
        if on_any_rank(failure is not None, context.inputs.context):
            blocks.pop(candidate, None)
    return blocks


def _times(context: BlockContext, candidates: Mapping[Candidate, PreparedBlock]) -> dict[Candidate, list[float]]:
    """Times of the slowest rank by the clock of `choose_by`, all measured alternately, of the fastest candidates."""
    clock = context.inputs.problem.choose_by
    timer = partial(context.stopwatch.interleaved_ms, on_host=clock == "wall")
    times: dict[Candidate, list[float]] = {}
    iterations = LEAST_ITERATIONS
    for _ in range(2):  # a first look, then the trial of the fastest
        steps = [(partial(_step, candidates[name]), do_nothing) for name in times or candidates]
        samples = (context.stopwatch.chained_ms if clock == "chained" else timer)(*steps, iterations=iterations)
        times = dict(zip(times or candidates, samples, strict=True))
        fastest = min(map(median, samples))
        times = {candidate: of_one for candidate, of_one in times.items() if median(of_one) <= SLOWER * fastest}
        iterations = ITERATIONS
        if clock != "chained":  # each of its samples is already the time of many steps
            iterations = max(ITERATIONS, min(MOST_ITERATIONS, int(TRIAL_MS / fastest)))
    return times


def _step(prepared: PreparedBlock) -> None:
    """Run one step and free its gradients: other candidates need the memory."""
    prepared.step()
    prepared.free()
