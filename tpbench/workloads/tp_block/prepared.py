"""What a variant is made with, and what it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads.tp_block.block import Planner, build
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import TpBlock
from tpbench.workloads.tp_block.schedule import LinearPlan, NoCommunicationSchedule, Schedule
from tpbench.workloads.tp_block.sharded_linear import ShardedLinear


@dataclass(frozen=True)
class BlockContext:
    """What a variant is prepared with."""

    problem: TpBlock
    inputs: BlockInputs
    stopwatch: Stopwatch


@dataclass(frozen=True)
class PreparedBlock:
    """A variant on one rank: the module that a step runs, and one to compare it with."""

    module: nn.Module
    x: Tensor
    """The leaf that the module is given."""
    grad: Tensor
    """The gradient by what it returns."""
    bare: nn.Module | None
    """The same with its communication removed, on the same weights; None where there is none to remove."""
    plan: Planner | None
    """The schedules, where the linears have any."""
    size: int
    """Ranks that share the block: 1 where each has the whole."""
    run: Callable[[Tensor], Tensor]
    """Calls the module."""
    run_bare: Callable[[Tensor], Tensor] | None
    facts: Callable[[], dict[str, Any]] = field(default=dict)
    """Columns that the variant knows of itself, after a step."""


def prepare(
    place: BlockContext,
    plan: Planner | Schedule,
    *,
    through: Callable[[nn.Module], Callable[[Tensor], Tensor]] = lambda module: module,
    facts: Callable[[], dict[str, Any]] = dict,
) -> PreparedBlock:
    """This rank's part of the block under a plan, or all of it under a schedule of one process.

    `through`: what becomes of a module before it is called, such as torch.compile.
    """
    planner = plan if callable(plan) else _always(plan)
    schedule = planner(place.problem.linears[0]).forward
    rank, size = schedule.rank, schedule.size
    inputs = place.inputs
    weights = inputs.weights if size == inputs.size else inputs.weights_of(rank, size)
    module = build(place.problem, weights, planner)
    bare = build(place.problem, weights, _always(NoCommunicationSchedule(rank, size))) if size > 1 else None
    return PreparedBlock(
        module=module,
        x=inputs.x(rank, size).requires_grad_(),
        grad=inputs.grad(rank, size),
        bare=bare,
        plan=planner if size > 1 else None,
        size=size,
        run=through(module),
        run_bare=None if bare is None else through(bare),
        facts=facts,
    )


def _always(schedule: Schedule) -> Planner:
    plan = LinearPlan.always(schedule)

    def planner(linear: ShardedLinear) -> LinearPlan:
        return plan

    return planner
