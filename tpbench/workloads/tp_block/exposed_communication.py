"""What of a step's communication its products do not hide.

exposed = step - the same step with its communication removed (products in one piece): the median of the differences of
pairs that were timed one right after the other; hidden = 1 - exposed / all the step's collectives alone, one after the
other. What cutting products into chunks costs so counts as exposed. The sums of the norms' gradients are collectives
that nobody here hides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.measure.stopwatch import Stopwatch, do_nothing, paired_difference
from tpbench.workloads.tp_block import linear_operations
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.prepared import PreparedBlock
from tpbench.workloads.tp_block.schedule import NoCommunicationSchedule, Schedule, SequentialSchedule
from tpbench.workloads.tp_block.sharded_linear import ShardedLinear

Operation: TypeAlias = Callable[[Schedule], None]
"""One of a linear, under a schedule."""


def measure(
    inputs: BlockInputs,
    prepared: PreparedBlock,
    stopwatch: Stopwatch,
    step: Callable[[], None],
    release_step: Callable[[], None],
) -> dict[str, Any]:
    """The columns about it. Collective; nothing where nothing is sent."""
    if prepared.bare is None or prepared.run_bare is None:
        return {}
    run_bare, bare = prepared.run_bare, prepared.bare

    def without() -> None:
        run_bare(prepared.x).backward(prepared.grad)

    def release() -> None:
        bare.zero_grad(set_to_none=True)
        prepared.x.grad = None

    whole, bare_step = stopwatch.interleaved_ms((step, release_step), (without, release))
    release_step()
    release()
    collectives = Collectives(inputs)
    communication_ms = stopwatch.ms(collectives.run)
    exposed_ms = paired_difference(whole, bare_step)
    found = {
        "compute_ms": median(bare_step),
        "communication_ms": communication_ms,
        "exposed_ms": exposed_ms,
        "hidden_share": 1 - exposed_ms / communication_ms,
    }
    return found | _by_direction(inputs, prepared, stopwatch, collectives)


class Collectives:
    """The collectives that a step cannot do without, as the plain schedule has them."""

    def __init__(self, inputs: BlockInputs) -> None:
        self.schedule = SequentialSchedule(inputs.group)
        self.passes = len(inputs.problem.linears)
        again = sum(each.kind == "column" for each in inputs.problem.linears)
        self.gathers = self.passes + (0 if inputs.problem.save_gathered else again)
        shape = (inputs.problem.tokens // inputs.size, inputs.problem.hidden)
        self.shard = torch.zeros(shape, dtype=inputs.dtype, device=inputs.device)
        self.whole = self.shard.repeat(inputs.size, 1)
        self.norms = len(inputs.problem.norms)

    def run(self) -> None:
        """All of a step's."""
        for _ in range(self.gathers):
            self.gather()
        for _ in range(self.passes):
            self.scatter()
        for _ in range(self.norms):
            dist.all_reduce(self.shard[0], group=self.schedule.group)

    def gather(self) -> None:
        """One all-gather."""
        self.schedule.gather(self.shard)

    def scatter(self) -> None:
        """One reduce-scatter."""
        self.schedule.scatter(self.whole)


def _by_direction(
    inputs: BlockInputs, prepared: PreparedBlock, stopwatch: Stopwatch, collectives: Collectives
) -> dict[str, float]:
    """The share hidden in each direction, from the forward operations of the linears alone."""
    if prepared.plan is None:
        return {}
    exposed: dict[str, list[float]] = {"column": [], "row": []}
    silent = NoCommunicationSchedule(inputs.rank, inputs.size)
    for linear in inputs.problem.linears:
        run, schedule = forward(inputs, linear), prepared.plan(linear).forward
        mine, bare = stopwatch.interleaved_ms((partial(run, schedule), do_nothing), (partial(run, silent), do_nothing))
        exposed[linear.kind].append(paired_difference(mine, bare))
    alone = {"column": stopwatch.ms(collectives.gather), "row": stopwatch.ms(collectives.scatter)}
    names = {"column": "gather_hidden", "row": "scatter_hidden"}
    return {names[kind]: 1 - sum(each) / (len(each) * alone[kind]) for kind, each in exposed.items() if each}


def forward(inputs: BlockInputs, linear: ShardedLinear) -> Operation:
    """A linear's forward operation on inputs of its size."""
    weight, x, keep = inputs.weights[linear.name], activations(inputs, linear), inputs.problem.save_gathered

    def run(schedule: Schedule) -> None:
        if linear.kind == "row":
            linear_operations.row_forward(schedule, x, weight)
        else:
            linear_operations.column_forward(schedule, x, weight, keep)

    return run


def backward(inputs: BlockInputs, linear: ShardedLinear) -> Operation:
    """A linear's backward operation on gradients of its size."""
    weight, x = inputs.weights[linear.name], activations(inputs, linear)
    saved, rows = inputs.problem.save_gathered, inputs.problem.tokens
    by_row = linear.kind == "row"
    grad = _numbers(inputs, *((rows // inputs.size, linear.out_features[0]) if by_row else (rows, weight.shape[0])))
    kept = x.repeat(inputs.size, 1) if saved and not by_row else x

    def run(schedule: Schedule) -> None:
        if by_row:
            linear_operations.row_backward(schedule, grad, x, weight)
        else:
            linear_operations.column_backward(schedule, grad, weight, kept, saved)

    return run


def activations(inputs: BlockInputs, linear: ShardedLinear) -> Tensor:
    """What a linear is given, in size and kind."""
    rows = inputs.problem.tokens // (inputs.size if linear.kind == "column" else 1)
    return _numbers(inputs, rows, linear.local_shape(inputs.size)[1])


def _numbers(inputs: BlockInputs, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device=inputs.device).to(inputs.dtype)
