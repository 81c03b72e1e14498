"""What a row says about the communication of a step: how much of it is exposed.

exposed = step - the same step with its communication removed. The second step computes each product in one piece. The
result is the median of the differences of interleaved pairs.

hidden share = 1 - exposed / time of all the step's collectives alone, one after the other.

The cost of cutting products into chunks therefore counts as exposed. The all-reduces of the norms' gradients count as
communication that no variant hides.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch._dynamo  # optimizers need it: import it before jobs are forked, not in each
import torch.distributed as dist

from tpbench.comm.collectives import gather_rows, scatter_rows
from tpbench.measure.clock import Stopwatch, paired_difference
from tpbench.workloads.tp_block.execution.prepared import PreparedBlock, graphed
from tpbench.workloads.tp_block.inputs import BlockInputs


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
    collectives = step_collectives(inputs).values()

    def communicate() -> None:
        for run, times in collectives:
            for _ in range(times):
                run()

    communication_ms = stopwatch.ms(communicate)
    exposed_ms = paired_difference(step_times, compute_times)
    return {
        "compute_ms": median(compute_times),
        "communication_ms": communication_ms,
        "exposed_ms": exposed_ms,
        "chained_compute_ms": median(alone),
        "chained_exposed_ms": paired_difference(chained, alone),
        "hidden_share": 1 - exposed_ms / communication_ms,
    }
