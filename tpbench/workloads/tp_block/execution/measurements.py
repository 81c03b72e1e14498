"""What a row says about the communication of a step: how much of it is exposed.

exposed = step - the same step with its communication removed. The second step computes each product in one piece. The
result is the median of the differences of interleaved pairs.

hidden share = 1 - exposed / time of all the step's collectives alone, one after the other.

The cost of cutting products into chunks therefore counts as exposed. The all-reduces of the norms' gradients count as
communication that no variant hides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import fmean, median
from typing import Any, TypeAlias

import torch
import torch._dynamo  # optimizers need it: import it before jobs are forked, not in each
import torch.distributed as dist
from torch import Tensor

from tpbench.comm import parallel_linears
from tpbench.comm.collectives import gather_rows, scatter_rows
from tpbench.comm.parallel_linears import Schedule
from tpbench.measure.clock import Stopwatch, do_nothing, paired_difference
from tpbench.workloads.tp_block.execution.prepared import NoCommunicationSchedule, PreparedBlock
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import ShardedLinear

Operation: TypeAlias = Callable[[Schedule], Any]
"""Runs one operation of a linear under a schedule."""


def linear_operation(inputs: BlockInputs, linear: ShardedLinear, direction: str) -> Operation:
    """Return a linear's forward or backward operation on random numbers, to time it alone under any schedule."""
    weight, keep = inputs.weights[linear.name], inputs.problem.save_gathered
    all_rows, own_rows = inputs.problem.tokens, inputs.problem.tokens // inputs.size

    def numbers(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=inputs.device).to(inputs.dtype)

    if linear.kind == "row":
        x = numbers(all_rows, weight.shape[1])
        if direction == "forward":
            return lambda schedule: schedule.matmul_scatter(x, weight.t(), awaited=True)()
        grad = numbers(own_rows, weight.shape[0])
        return lambda schedule: parallel_linears.row_backward(schedule, grad, x, weight)
    shard = numbers(own_rows, weight.shape[1])
    if direction == "forward":
        return lambda schedule: schedule.gather_matmul(shard, weight.t(), keep=keep)
    grad = numbers(all_rows, weight.shape[0])
    kept = shard.repeat(inputs.size, 1) if keep else shard
    return lambda schedule: parallel_linears.column_backward(schedule, grad, weight, kept, keep)


class StepCollectives:
    """The collectives that a step needs, as the sequential schedule runs them."""

    def __init__(self, inputs: BlockInputs) -> None:
        problem, group = inputs.problem, inputs.group
        again = 0 if problem.save_gathered else sum(linear.kind == "column" for linear in problem.linears)
        self.gathers, self.scatters = len(problem.linears) + again, len(problem.linears)
        self.norms = len(problem.norms)
        rows = problem.tokens // inputs.size
        self.shard = torch.zeros(rows, problem.hidden, dtype=inputs.dtype, device=inputs.device)
        self.gather: Callable[[], Any] = partial(gather_rows, self.shard, group)
        self.scatter: Callable[[], Any] = partial(scatter_rows, self.shard.repeat(inputs.size, 1), group)
        self.reduce: Callable[[], Any] = lambda: dist.all_reduce(self.shard[0], group=group)

    def run(self) -> None:
        """Run all collectives of a step."""
        for collective, times in (
            (self.gather, self.gathers),
            (self.scatter, self.scatters),
            (self.reduce, self.norms),
        ):
            for _ in range(times):
                collective()


def exposed_communication(inputs: BlockInputs, prepared: PreparedBlock, stopwatch: Stopwatch) -> dict[str, Any]:
    """Return the columns about exposed communication, none if the block does not communicate. Collective."""
    if (silent := prepared.without_communication) is None:
        return {}

    def free() -> None:
        silent.free()
        prepared.free()

    step_times, compute_times = stopwatch.interleaved_ms((prepared.step, free), (silent.step, free))
    free()
    collectives = StepCollectives(inputs)
    communication_ms = stopwatch.ms(collectives.run)
    exposed_ms = paired_difference(step_times, compute_times)
    columns = {
        "compute_ms": median(compute_times),
        "communication_ms": communication_ms,
        "exposed_ms": exposed_ms,
        "hidden_share": 1 - exposed_ms / communication_ms,
    }
    if prepared.plan is None:
        return columns
    # All-gathers and reduce-scatters by themselves, in the forward operations of the linears alone.
    without = NoCommunicationSchedule(inputs.rank, inputs.size)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for linear in inputs.problem.linears:
        operation, schedule = linear_operation(inputs, linear, "forward"), prepared.plan(linear).forward
        timed = [(partial(operation, each), do_nothing) for each in (schedule, without)]
        by_kind[linear.kind].append(paired_difference(*stopwatch.interleaved_ms(*timed)))
    for kind, name, collective in (("column", "gather", collectives.gather), ("row", "scatter", collectives.scatter)):
        alone_ms = stopwatch.ms(collective)
        if by_kind[kind]:
            columns[f"{name}_hidden"] = 1 - fmean(by_kind[kind]) / alone_ms
    return columns
