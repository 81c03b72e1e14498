"""Measure the communication of a step that its products do not hide.

exposed = step - the same step with its communication removed. The second step computes each product in one piece. The
result is the median of the differences of interleaved pairs.

hidden share = 1 - exposed / time of all the step's collectives alone, one after the other.

The cost of cutting products into chunks therefore counts as exposed. The all-reduces of the norms' gradients count as
communication that no variant hides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tpbench.comm.collectives import gather_rows, scatter_rows
from tpbench.measure.stopwatch import Stopwatch, do_nothing, paired_difference
from tpbench.workloads.tp_block.execution import isolated_operations
from tpbench.workloads.tp_block.execution.prepared import NoCommunicationSchedule, PreparedBlock
from tpbench.workloads.tp_block.inputs import BlockInputs


def measure(
    inputs: BlockInputs,
    prepared: PreparedBlock,
    stopwatch: Stopwatch,
    step: Callable[[], None],
    release_step: Callable[[], None],
) -> dict[str, Any]:
    """Return the columns about exposed communication, none if the block does not communicate. Collective."""
    if prepared.without_communication is None or prepared.run_without_communication is None:
        return {}
    run, module = prepared.run_without_communication, prepared.without_communication

    def compute_step() -> None:
        run(prepared.x).backward(prepared.grad)

    def release_compute_step() -> None:
        module.zero_grad(set_to_none=True)
        prepared.x.grad = None

    step_ms, compute_ms = stopwatch.interleaved_ms((step, release_step), (compute_step, release_compute_step))
    release_step()
    release_compute_step()
    collectives = StepCollectives(inputs)
    communication_ms = stopwatch.ms(collectives.run)
    exposed_ms = paired_difference(step_ms, compute_ms)
    columns = {
        "compute_ms": median(compute_ms),
        "communication_ms": communication_ms,
        "exposed_ms": exposed_ms,
        "hidden_share": 1 - exposed_ms / communication_ms,
    }
    return columns | _by_direction(inputs, prepared, stopwatch, collectives)


class StepCollectives:
    """The collectives that a step needs, as the sequential schedule runs them."""

    def __init__(self, inputs: BlockInputs) -> None:
        problem = inputs.problem
        again = 0 if problem.save_gathered else sum(linear.kind == "column" for linear in problem.linears)
        self.group = inputs.group
        self.gathers, self.scatters = len(problem.linears) + again, len(problem.linears)
        self.norms = len(problem.norms)
        self.shard = torch.zeros(
            problem.tokens // inputs.size, problem.hidden, dtype=inputs.dtype, device=inputs.device
        )
        self.whole = self.shard.repeat(inputs.size, 1)

    def run(self) -> None:
        """Run all collectives of a step."""
        for _ in range(self.gathers):
            self.gather()
        for _ in range(self.scatters):
            self.scatter()
        for _ in range(self.norms):
            dist.all_reduce(self.shard[0], group=self.group)

    def gather(self) -> None:
        """Run one all-gather."""
        gather_rows(self.shard, self.group)

    def scatter(self) -> None:
        """Run one reduce-scatter."""
        scatter_rows(self.whole, self.group)


def _by_direction(
    inputs: BlockInputs, prepared: PreparedBlock, stopwatch: Stopwatch, collectives: StepCollectives
) -> dict[str, float]:
    """The hidden share of all-gathers and of reduce-scatters, from the forward operations of the linears alone."""
    if prepared.plan is None:
        return {}
    exposed_ms: dict[str, list[float]] = {"column": [], "row": []}
    without = NoCommunicationSchedule(inputs.rank, inputs.size)
    for linear in inputs.problem.linears:
        run, schedule = isolated_operations.forward(inputs, linear), prepared.plan(linear).forward
        samples = stopwatch.interleaved_ms((partial(run, schedule), do_nothing), (partial(run, without), do_nothing))
        exposed_ms[linear.kind].append(paired_difference(*samples))
    alone_ms = {"column": stopwatch.ms(collectives.gather), "row": stopwatch.ms(collectives.scatter)}
    names = {"column": "gather_hidden", "row": "scatter_hidden"}
    return {names[kind]: 1 - sum(each) / (len(each) * alone_ms[kind]) for kind, each in exposed_ms.items() if each}
