"""What a row says about the communication of a step: how much of it is exposed.

exposed = step - the same step with its communication removed. The second step computes each product in one piece. The
result is the median of the differences of interleaved pairs.

hidden share = 1 - exposed / time of all the step's collectives alone, one after the other.

The cost of cutting products into chunks therefore counts as exposed. The all-reduces of the norms' gradients count as
communication that no variant hides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
import torch._dynamo  # optimizers need it: import it before jobs are forked, not in each
import torch.distributed as dist

from tpbench.comm.collectives import gather_rows, scatter_rows
from tpbench.comm.parallel_linears import Schedule
from tpbench.measure.clock import Stopwatch, do_nothing, paired_difference
from tpbench.workloads.tp_block.execution.prepared import NoCommunicationSchedule, PreparedBlock, graphed
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import ShardedLinear


def forward_operation(inputs: BlockInputs, linear: ShardedLinear) -> Callable[[Schedule], Any]:
    """Return a linear's forward operation on random numbers, to time it alone under any schedule."""
    weight, keep = inputs.weights[linear.name], inputs.problem.save_gathered
    rows = inputs.problem.tokens // (1 if linear.kind == "row" else inputs.size)
    x = torch.randn(rows, weight.shape[1], device=inputs.device).to(inputs.dtype)
    if linear.kind == "row":
        return lambda schedule: schedule.matmul_scatter(x, weight.t(), awaited=True)()
    return lambda schedule: schedule.gather_matmul(x, weight.t(), keep=keep)


def step_collectives(inputs: BlockInputs) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return a step's collectives by name, as the sequential schedule runs them, each with their number."""
    problem, group = inputs.problem, inputs.group
    again = 0 if problem.save_gathered else sum(linear.kind == "column" for linear in problem.linears)
    shard = torch.zeros(problem.tokens // inputs.size, problem.hidden, dtype=inputs.dtype, device=inputs.device)
    whole = shard.repeat(inputs.size, 1)
    return {
        "gather": (lambda: gather_rows(shard, group), len(problem.linears) + again),
        "scatter": (lambda: scatter_rows(whole, group), len(problem.linears)),
        "reduce": (lambda: dist.all_reduce(shard[0], group=group), len(problem.norms)),
    }


def exposed_communication(
    inputs: BlockInputs, prepared: PreparedBlock, stopwatch: Stopwatch, graph: bool
) -> dict[str, Any]:
    """Return the columns about exposed communication, none if the block does not communicate. Collective.

    `graph`: steps back to back replay CUDA graphs of their passes.
    """
    if (silent := prepared.without_communication) is None:
        return {}

    def free() -> None:
        silent.free()
        prepared.free()

    step_times, compute_times = stopwatch.interleaved_ms((prepared.step, free), (silent.step, free))
    in_loop = (graphed(prepared), graphed(silent)) if graph else (prepared, silent)
    chained, alone = stopwatch.chained_ms(*((block.step, free) for block in in_loop))
    free()
    collectives = step_collectives(inputs)

    def communicate() -> None:
        for run, times in collectives.values():
            for _ in range(times):
                run()

    communication_ms = stopwatch.ms(communicate)
    exposed_ms = paired_difference(step_times, compute_times)
    columns = {
        "compute_ms": median(compute_times),
        "communication_ms": communication_ms,
        "exposed_ms": exposed_ms,
        "chained_compute_ms": median(alone),
        "chained_exposed_ms": paired_difference(chained, alone),
        "hidden_share": 1 - exposed_ms / communication_ms,
    }
    if prepared.schedule is None:
        return columns
    # All-gathers and reduce-scatters by themselves, in the forward operations of the linears alone.
    schedules = prepared.schedule, NoCommunicationSchedule(inputs.rank, inputs.size)
    for kind, name in (("column", "gather"), ("row", "scatter")):
        exposed = []
        for linear in inputs.problem.linears:
            if linear.kind == kind:
                operation = forward_operation(inputs, linear)
                timed = [(partial(operation, schedule), do_nothing) for schedule in schedules]
                exposed.append(paired_difference(*stopwatch.interleaved_ms(*timed)))
        if exposed:
            columns[f"{name}_hidden"] = 1 - fmean(exposed) / stopwatch.ms(collectives[name][0])
    return columns
