"""RMSNorm of partial sums, as after a row-parallel linear: the sum over the ranks, fused with the norm or not.

`python -m tpbench -m variant=FILE:all_reduce,FILE:reduce_scatter,FILE:symmetric tokens=256,4096 tp_size=2`
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpbench.api import Costs, Rank, Workload, setting


@dataclass(frozen=True)
class ShardedRmsNorm:
    """Partial sums of all tokens on each rank."""

    tokens: int = setting(4096, help="tokens, of which each rank has partial sums", low=1)
    hidden: int = setting(4096, help="width of a token", low=1)

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """Return complaints. The tokens are divided by the ranks."""
        return [f"tokens={self.tokens} must be a multiple of tp_size={tp_size}"] if self.tokens % tp_size else []


norm = Workload(ShardedRmsNorm, "sum over the ranks, then RMSNorm")


@norm.inputs
def inputs(problem: ShardedRmsNorm, rank: Rank) -> dict[str, Tensor]:
    """Return the rank's partial sums, and the norm's weight, which is equal on all ranks."""
    own = torch.Generator(rank.device).manual_seed(rank.seed * rank.world_size + rank.rank + 1)
    shared = torch.Generator(rank.device).manual_seed(rank.seed)
    return {
        "partial": torch.randn(problem.tokens, problem.hidden, generator=own, device=rank.device).bfloat16(),
        "weight": (1 + torch.randn(problem.hidden, generator=shared, device=rank.device) / 10).bfloat16(),
    }


def rms_norm(total: Tensor, weight: Tensor) -> Tensor:
    """Return total / its root mean square * weight."""
    return F.rms_norm(total, (len(weight),), weight.to(total.dtype), eps=1e-6)


@norm.reference
def reference(problem: ShardedRmsNorm, inputs: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    """Return the norm of the sum."""
    total = inputs["partial"].double()
    dist.all_reduce(total, group=rank.tp_group)
    return {"y": rms_norm(total, inputs["weight"].double())}


@norm.costs
def costs(problem: ShardedRmsNorm, rank: Rank) -> Costs:
    """Count one read and one write of the tokens, and a reduce-scatter and an all-gather of them."""
    size = 2 * problem.tokens * problem.hidden
    sent = 2 * size * (rank.tp_size - 1) // rank.tp_size
    return Costs(bytes_moved=2 * size, bytes_communicated=sent, flops=4 * problem.tokens * problem.hidden)


@norm.variant("all-reduce, then the norm of all tokens on each rank")
def all_reduce(problem: ShardedRmsNorm, inputs: dict[str, Tensor], rank: Rank) -> Callable[[], dict[str, Tensor]]:
    """Prepare an iteration."""

    def step() -> dict[str, Tensor]:
        total = inputs["partial"].clone()
        dist.all_reduce(total, group=rank.tp_group)
        return {"y": rms_norm(total, inputs["weight"])}

    return step


@norm.variant("reduce-scatter, the norm of this rank's tokens, all-gather")
def reduce_scatter(problem: ShardedRmsNorm, inputs: dict[str, Tensor], rank: Rank) -> Callable[[], dict[str, Tensor]]:
    """Prepare an iteration."""
    partial, weight = inputs["partial"], inputs["weight"]
    share = partial.new_empty(problem.tokens // rank.tp_size, problem.hidden)

    def step() -> dict[str, Tensor]:
        dist.reduce_scatter_tensor(share, partial, group=rank.tp_group)
        y = torch.empty_like(partial)
        dist.all_gather_into_tensor(y, rms_norm(share, weight), group=rank.tp_group)
        return {"y": y}

    return step


@norm.variant(
    "one compiled kernel that reads all ranks' partial sums and writes the norm",
    requires_cuda=True,
    bytes_communicated=lambda problem, rank: 2 * problem.tokens * problem.hidden * (rank.tp_size - 1),
)
def symmetric(problem: ShardedRmsNorm, inputs: dict[str, Tensor], rank: Rank) -> Callable[[], dict[str, Tensor]]:
    """Prepare an iteration. The partial sums are copied to symmetric memory, which all ranks of a machine map."""
    from torch.distributed import _symmetric_memory

    partial, weight = inputs["partial"], inputs["weight"]
    shared = _symmetric_memory.empty(*partial.shape, dtype=partial.dtype, device=rank.device)
    memory = _symmetric_memory.rendezvous(shared, rank.tp_group)
    peers = [memory.get_buffer(peer, tuple(partial.shape), partial.dtype) for peer in range(rank.tp_size)]

    @torch.compile(dynamic=False)
    def norm_of_sum(partials: Sequence[Tensor], weight: Tensor) -> Tensor:
        return rms_norm(torch.stack([each.float() for each in partials]).sum(0), weight).to(weight.dtype)

    def step() -> dict[str, Tensor]:
        shared.copy_(partial)
        memory.barrier(channel=0)  # all copies are there
        y = norm_of_sum(peers, weight)
        memory.barrier(channel=1)  # all have read them
        return {"y": y}

    return step
