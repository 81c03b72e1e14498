"""Prepare a variant on one rank: build its module, and the same module without communication to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tpbench.comm.parallel_linears import LinearPlan, Pending, PlainSchedule, Schedule
from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.layers.block import Planner, build
from tpbench.workloads.tp_block.layers.sharded_linear import ShardedLinear


@dataclass(frozen=True)
class BlockContext:
    """This rank's inputs, and a stopwatch to choose between schedules."""

    inputs: BlockInputs
    stopwatch: Stopwatch
    graph: bool = False
    """True if whole iterations are captured in a CUDA graph later."""


@dataclass(frozen=True)
class PreparedBlock:
    """A variant on one rank, ready to run."""

    module: nn.Module
    x: Tensor
    """The input of the module, a leaf that requires its gradient."""
    grad: Tensor
    """The upstream gradient: of the loss by the module's output."""
    without_communication: nn.Module | None
    """The module on the same weights with its communication removed. None if it has none, and for a stack."""
    plan: Planner | None
    """The schedules of the linears, or None if they have none that can be timed alone."""
    size: int
    """The number of ranks that share the block: 1 if each rank has the whole block."""
    run: Callable[[Tensor], Tensor]
    """Calls the module, possibly compiled."""
    run_without_communication: Callable[[Tensor], Tensor] | None
    """Calls the module without communication, possibly compiled."""
    columns: Callable[[], dict[str, Any]] = field(default=dict)
    """Returns further columns of the variant, after a step."""


class NoCommunicationSchedule(PlainSchedule):
    """The sequential schedule with its communication removed, to time a step's products alone. Results are wrong.

    A gathered tensor is replaced by copies of the first shard of that shape, so that products use real numbers.
    """

    group = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.divisor = rank, size, size
        self.replacements: dict[torch.Size, Tensor] = {}

    def gather(self, shard: Tensor) -> Pending:
        if shard.shape not in self.replacements:
            self.replacements[shard.shape] = shard.detach().repeat(self.size, 1)
        whole = self.replacements[shard.shape]
        return lambda: whole

    def scatter(self, partial: Tensor) -> Tensor:
        return partial.view(self.size, -1, partial.shape[1])[self.rank]


def prepare(
    context: BlockContext,
    plan: Planner | Schedule,
    *,
    wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]] = lambda module: module,
    columns: Callable[[], dict[str, Any]] = dict,
) -> PreparedBlock:
    """Prepare this rank's part of the block under a plan, or the whole block under the schedule of one process.

    With `layers` the module is a stack of blocks, each with weights of its own.

    `wrap` is applied to each module before it is called, for example torch.compile.
    """
    inputs, problem = context.inputs, context.inputs.problem
    planner = plan if callable(plan) else _always(plan)
    schedule = planner(problem.linears[0]).forward
    rank, size = schedule.rank, schedule.size
    without = None
    if problem.layers:
        layers = (inputs.weights_of(rank, size, layer) for layer in range(problem.layers))
        module: nn.Module = nn.Sequential(*(build(problem, weights, planner) for weights in layers))
    else:
        weights = inputs.weights if size == inputs.size else inputs.weights_of(rank, size)
        module = build(problem, weights, planner)
        if size > 1:
            without = build(problem, weights, _always(NoCommunicationSchedule(rank, size)))
    return PreparedBlock(
        module=module,
        x=inputs.x(rank, size).requires_grad_(),
        grad=inputs.grad(rank, size),
        without_communication=without,
        plan=planner if size > 1 else None,
        size=size,
        run=wrap(module),
        run_without_communication=None if without is None else wrap(without),
        columns=columns,
    )


def _always(schedule: Schedule) -> Planner:
    plan = LinearPlan.always(schedule)

    def planner(linear: ShardedLinear) -> LinearPlan:
        return plan

    return planner
