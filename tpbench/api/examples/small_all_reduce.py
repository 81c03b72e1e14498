"""An all-reduce of small messages: NCCL against a one-shot exchange, in which each rank gets the data of all others.

`python -m tpbench -m variant=FILE:nccl,FILE:one_shot elements=1024,16384,262144 tp_size=2`
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.api import Costs, Rank, Workload, setting


@dataclass(frozen=True)
class SmallAllReduce:
    """A vector on each rank."""

    elements: int = setting(16384, help="elements of a rank's vector, in bfloat16", low=1)


small_all_reduce = Workload(SmallAllReduce, "all-reduce of a small vector")


@small_all_reduce.inputs
def inputs(problem: SmallAllReduce, rank: Rank) -> dict[str, Tensor]:
    """Return the rank's vector."""
    generator = torch.Generator(rank.device).manual_seed(rank.seed * rank.world_size + rank.rank)
    return {"x": torch.randn(problem.elements, generator=generator, device=rank.device).bfloat16()}


@small_all_reduce.reference
def reference(problem: SmallAllReduce, inputs: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    """Return the sum over the ranks."""
    total = inputs["x"].double()
    dist.all_reduce(total, group=rank.tp_group)
    return {"sum": total}


@small_all_reduce.costs
def costs(problem: SmallAllReduce, rank: Rank) -> Costs:
    """Count one read and one write, and the least that a rank must send: a reduce-scatter and an all-gather."""
    size = 2 * problem.elements
    sent = 2 * size * (rank.tp_size - 1) // rank.tp_size
    return Costs(bytes_moved=2 * size, bytes_communicated=sent, flops=problem.elements)


@small_all_reduce.variant("a copy and the backend's all-reduce")
def nccl(problem: SmallAllReduce, inputs: dict[str, Tensor], rank: Rank) -> Callable[[], dict[str, Tensor]]:
    """Prepare an iteration. An output may not lie in the memory of an input."""

    def step() -> dict[str, Tensor]:
        total = inputs["x"].clone()
        dist.all_reduce(total, group=rank.tp_group)
        return {"sum": total}

    return step


@small_all_reduce.variant(
    "an all-gather, then a sum on each rank",
    bytes_communicated=lambda problem, rank: 2 * problem.elements * (rank.tp_size - 1),  # more than the workload counts
)
def one_shot(problem: SmallAllReduce, inputs: dict[str, Tensor], rank: Rank) -> Callable[[], dict[str, Tensor]]:
    """Prepare an iteration."""
    gathered = inputs["x"].new_empty(rank.tp_size, problem.elements)

    def step() -> dict[str, Tensor]:
        dist.all_gather_into_tensor(gathered.view(-1), inputs["x"], group=rank.tp_group)
        return {"sum": gathered.sum(0)}

    return step
