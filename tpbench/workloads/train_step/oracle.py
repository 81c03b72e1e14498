"""Compute the reference of a run: the same training by one process or, if that costs too much, a forward pass.

The reference starts from the same bits and uses the micro-batches of all replicas and the same dtypes. It runs eagerly,
with torch's loss and nothing sharded. Rank 0 trains the first `STEPS` steps if two estimates are small enough. The
whole model's parameters, gradients, states and activations must fit into `MEMORY_SHARE` of that rank's free memory, and
the steps must take at most `MAX_FLOPS` operations. Otherwise every rank computes only the first step's loss, by a
forward pass that holds the weights of one layer at a time. This is possible for any model but checks no gradients.

For an audited run, rank 0 trains all steps and further ones on changed batches, if they take at most `MAX_FLOPS`, too.
The reference's `source` says what it checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from tpbench.measure import memory
from tpbench.measure.session import Context
from tpbench.workloads.train_step.correctness.later_reference import LaterReference
from tpbench.workloads.train_step.correctness.reference import Reference
from tpbench.workloads.train_step.correctness.single_process import first_loss, free_memory, train_first_steps
from tpbench.workloads.train_step.estimates.memory import estimate_memory
from tpbench.workloads.train_step.model import sizes
from tpbench.workloads.train_step.problem import TrainStep

STEPS = 3
UNCHECKED = "; later steps are not checked"
"""End of the `source` of a reference that is cheaper than an audited run needs."""
MEMORY_SHARE = 0.7
MAX_FLOPS = {"cpu": 2e12, "cuda": 3e16}
"""By kind of device: about half a minute."""


def compute_reference(problem: TrainStep, context: Context, changes: Sequence[int] = ()) -> Reference:
    """Return the problem's reference. Collective. Call it before the model is made; it keeps no memory.

    `changes`: for each further step of an audited run, by how many positions it rolls the last batches. Empty: the run
    is not audited.
    """
    total = problem.warmup_steps + problem.steps
    plain = replace(problem, activation_checkpointing=True, compile=False, train_loss="torch", optimizer="torch")
    unchecked = UNCHECKED if changes else ""
    for steps, further in [(total, changes)] * bool(changes) + [(min(STEPS, total), ())]:
        trained = _trained(plain, steps, further, context)
        if trained is not None:
            return _of_whole_run(plain, trained, total) if further else _of_first_steps(trained, unchecked)
    context.say("oracle: the first step's loss by a forward pass")
    loss = first_loss(plain, context)
    free_memory(context.device)
    return Reference(f"loss of the first step by a forward pass{unchecked}", (loss,), ())


def _trained(problem: TrainStep, steps: int, changes: Sequence[int], context: Context) -> torch.Tensor | None:
    """Return what `train_first_steps` returns, on every rank, or None if it costs too much. Collective."""
    count = steps + len(changes)
    affordable = torch.tensor(_affordable(problem, count, context))
    dist.broadcast(affordable, src=0)
    if not affordable:
        return None
    context.say(f"oracle: {count} steps by one process")
    trained = torch.empty(3, count, dtype=torch.float64)
    if context.rank == 0:
        trained = train_first_steps(problem, steps, context, changes)
    free_memory(context.device)
    dist.broadcast(trained, src=0)
    return trained if trained.isfinite().all() else None


def _of_first_steps(trained: torch.Tensor, unchecked: str) -> Reference:
    losses, norms, _ = trained.tolist()
    return Reference(f"{len(losses)} steps by one process{unchecked}", tuple(losses), tuple(norms))


def _of_whole_run(problem: TrainStep, trained: torch.Tensor, steps: int) -> Reference:
    losses, norms, untrained = (tuple(each) for each in trained.tolist())
    warmup = problem.warmup_steps
    last_of_warmup = losses[max(warmup - 1, 0)]
    later = LaterReference(losses[0], last_of_warmup, losses[warmup:steps], losses[steps:], untrained[steps:])
    source = f"{steps} steps and {len(losses) - steps} on changed batches by one process"
    if not later.shows_updates(problem.dtype):
        source += "; skipped updates would not show"
    first = min(STEPS, steps)
    return Reference(source, losses[:first], norms[:first], later)


def _affordable(problem: TrainStep, steps: int, context: Context) -> bool:
    needed = estimate_memory(problem, "ddp", 1, 1).total
    flops = sizes.step_flops(problem) * context.dp_size * steps
    return needed <= MEMORY_SHARE * memory.available_bytes(context.device) and flops <= MAX_FLOPS[context.device.type]
