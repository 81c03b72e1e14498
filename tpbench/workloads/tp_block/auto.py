"""The fastest schedule for each operation and shape, found by trying them before anything is timed.

What an operation takes alone is not quite what it takes within a step, where others came before and the GPU may be at
its power limit. So the mixture is then tried as a whole step, beside each of its schedules for all operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from tpbench.measure.stopwatch import nothing
from tpbench.workloads.tp_block.exposure import Operation, backward, forward
from tpbench.workloads.tp_block.linears import Linear
from tpbench.workloads.tp_block.prepared import Place, Prepared, prepare
from tpbench.workloads.tp_block.problem import TpBlock
from tpbench.workloads.tp_block.ring import Ring
from tpbench.workloads.tp_block.schedule import Plan, Schedule, Sequential

MARGIN = 0.99
"""Of the plain schedule's time: what is not faster than that by more than noise is not preferred to it."""

STEPS = 10
"""Timed, of each way to do the whole step."""

PLAIN, MIXED = "plain", "mixed"


class Chooser:
    """Plans by measured time. The stopwatch's times are the slowest rank's, the same on all ranks, which so agree."""

    def __init__(self, place: Place, schedules: Mapping[str, Schedule]) -> None:
        self.place, self.schedules = place, schedules
        self.chosen: dict[str, str] = {}

    def plan(self, linear: Linear) -> Plan:
        """A linear's schedules, forward and backward each for itself. Collective the first time."""
        return Plan(self._fastest("forward", linear, forward), self._fastest("backward", linear, backward))

    def settle(self) -> None:
        """Choose, and let go of what was not chosen. Collective."""
        for linear in self.place.problem.linears:
            self.plan(linear)
        self._try_steps()
        # An arena's memory goes with the last schedule that has it; what stays is kept to be counted.
        chosen = set(self.chosen.values())
        self.schedules = {
            name: each for name, each in self.schedules.items() if name in chosen or getattr(each, "lasting", False)
        }

    def facts(self) -> dict[str, Any]:
        """What was chosen, as a column, and all memory that is still there, each once."""
        said = ", ".join(f"{operation}: {name}" for operation, name in self.chosen.items())
        gib = sum(each.gib for each in {it.memory for it in self.schedules.values() if hasattr(it, "memory")})
        return {"chosen": said, **({"workspace_gib": gib} if gib else {})}

    def _try_steps(self) -> None:
        """Try the whole step, and leave the mixture for one schedule where that is faster."""
        names = sorted({PLAIN, *self.chosen.values()})
        if names == [PLAIN]:
            return
        ways = {name: prepare(self.place, self.schedules[name]) for name in names}
        if len(set(self.chosen.values())) > 1:
            ways[MIXED] = prepare(self.place, self.plan)
        best = self._best({name: partial(_step, way) for name, way in ways.items()}, STEPS)
        if best != MIXED:
            self.chosen = dict.fromkeys(self.chosen, best)

    def _fastest(self, name: str, linear: Linear, made: Callable[..., Operation]) -> Schedule:
        key = f"{linear.name} {name}"
        if key not in self.chosen:
            run = made(self.place.inputs, linear)
            self.chosen[key] = self._best({each: partial(run, it) for each, it in self.schedules.items()})
        return self.schedules[self.chosen[key]]

    def _best(self, ways: Mapping[str, Callable[[], None]], iterations: int | None = None) -> str:
        taken = self.place.stopwatch.in_turns(*((way, nothing) for way in ways.values()), iterations=iterations)
        if self.place.inputs.device.type == "cuda":
            torch.cuda.empty_cache()
        return pick(dict(zip(ways, map(median, taken), strict=True)))


def prepare_fastest(place: Place) -> Prepared:
    """Under what is chosen of this machine's schedules."""
    chooser = Chooser(place, candidates(place.problem, place))
    chooser.settle()
    return prepare(place, chooser.plan, facts=chooser.facts)


def pick(times: Mapping[str, float]) -> str:
    """The fastest, but the plain one where no other is clearly faster."""
    fastest = min(times, key=lambda name: times[name])
    return fastest if times[fastest] < MARGIN * times[PLAIN] else PLAIN


def _step(prepared: Prepared) -> None:
    """One step, of which nothing stays."""
    prepared.run(prepared.x).backward(prepared.grad)
    prepared.x.grad = None
    prepared.module.zero_grad(set_to_none=True)


def candidates(problem: TpBlock, place: Place) -> dict[str, Schedule]:
    """What can be chosen on this machine for this problem, by name."""
    inputs = place.inputs
    found: dict[str, Schedule] = {PLAIN: Sequential(inputs.group)}
    if problem.tokens % inputs.size**2 == 0:
        found["ring"] = Ring(inputs.group)
    if inputs.device.type == "cuda":
        from tpbench.comm.symmetric_buffers import SymmetricBuffers
        from tpbench.workloads.tp_block.copy_engine import CopyEngine
        from tpbench.workloads.tp_block.fused import Fused

        arena = SymmetricBuffers(inputs.group, inputs.device, problem.signals)
        found["symm_mem"] = Fused(inputs.group)
        found["copy_engine"] = CopyEngine(arena)
        if inputs.size > 2:  # one peer has no neighbour
            found["copy_engine_merged"] = CopyEngine(arena, merged=True)
    return found
