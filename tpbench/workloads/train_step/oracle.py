"""Compute the reference of a run: the same training by one process or, if that costs too much, a forward pass.

The reference starts from the same bits and uses the micro-batches of all replicas and the same dtypes. It runs eagerly,
with torch's loss and nothing sharded. Rank 0 trains the first `STEPS` steps if two estimates are small enough. The
whole model's parameters, gradients, states and activations must fit into `MEMORY_SHARE` of that rank's free memory, and
the steps must take at most `MAX_FLOPS` operations. Otherwise every rank computes only the first step's loss, by a
forward pass that holds the weights of one layer at a time. This is possible for any model but checks no gradients.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from tpbench.measure import memory
from tpbench.measure.session import Context
from tpbench.workloads.train_step import sizes
from tpbench.workloads.train_step.memory_estimate import estimate_memory
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.reference import Reference
from tpbench.workloads.train_step.single_process import first_loss, free_memory, train_first_steps

STEPS = 3
MEMORY_SHARE = 0.7
MAX_FLOPS = {"cpu": 2e12, "cuda": 3e16}
"""By kind of device: about half a minute."""


def compute_reference(problem: TrainStep, context: Context) -> Reference:
    """Return the problem's reference. Collective. Call it before the model is made; it keeps no memory."""
    steps = min(STEPS, problem.warmup_steps + problem.steps)
    plain = replace(problem, activation_checkpointing=True, compile=False, train_loss="torch", optimizer="torch")
    affordable = torch.tensor(_affordable(plain, steps, context))
    dist.broadcast(affordable, src=0)
    if affordable:
        context.say(f"oracle: {steps} steps by one process")
        trained = torch.empty(2, steps, dtype=torch.float64)
        if context.rank == 0:
            trained = train_first_steps(plain, steps, context)
        free_memory(context.device)
        dist.broadcast(trained, src=0)
        if trained.isfinite().all():
            return Reference(f"{steps} steps by one process", tuple(trained[0].tolist()), tuple(trained[1].tolist()))
    context.say("oracle: the first step's loss by a forward pass")
    loss = first_loss(plain, context)
    free_memory(context.device)
    return Reference("loss of the first step by a forward pass", (loss,), ())


def _affordable(problem: TrainStep, steps: int, context: Context) -> bool:
    needed = estimate_memory(problem, "ddp", 1, 1).total
    flops = sizes.step_flops(problem, 1) * context.dp_size * steps
    return needed <= MEMORY_SHARE * memory.available_bytes(context.device) and flops <= MAX_FLOPS[context.device.type]
