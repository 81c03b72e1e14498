"""A mixture-of-experts layer over several ranks: tokens go to the rank of their expert, and come back.

`python -m tpbench -m variant=FILE:all_to_all,FILE:all_gather tokens=1024,4096 tp_size=2` checks and times both.
An expert multiplies its tokens by a number, so that the time is that of the exchange.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.api import Costs, Rank, Workload, setting


# The fields are options of the command line, columns of rows and axes of tables.
@dataclass(frozen=True)
class Moe:
    """A layer in which each token has one expert."""

    tokens: int = setting(4096, help="tokens of a rank", low=1)
    hidden: int = setting(1024, help="width of a token", low=1)
    experts: int = setting(8, help="experts over all ranks", low=1)

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """Return complaints about a combination of fields. Such a cell is skipped."""
        return [f"experts={self.experts} must be a multiple of tp_size={tp_size}"] if self.experts % tp_size else []


moe = Workload(Moe, "dispatch of tokens to experts, and their combination")


@moe.inputs
def inputs(problem: Moe, rank: Rank) -> dict[str, Tensor]:
    """Return this rank's inputs, from the problem, the rank and its seed only."""
    generator = torch.Generator(rank.device).manual_seed(rank.seed * rank.world_size + rank.rank)
    shared = torch.Generator(rank.device).manual_seed(rank.seed)  # equal on all ranks
    return {
        "x": torch.randn(problem.tokens, problem.hidden, generator=generator, device=rank.device).bfloat16(),
        "expert": torch.randint(problem.experts, (problem.tokens,), generator=generator, device=rank.device),
        "scale": torch.rand(problem.experts, generator=shared, device=rank.device) + 0.5,
    }


@moe.reference
def reference(problem: Moe, inputs: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    """Return the correct outputs in float64. Each output of a variant is compared with the one of the same name."""
    return {"y": inputs["x"].double() * inputs["scale"].double()[inputs["expert"], None]}


@moe.costs
def costs(problem: Moe, rank: Rank) -> Costs:
    """Count what no variant can avoid: it reads x and writes y, and tokens of other ranks' experts travel twice."""
    size = problem.tokens * problem.hidden * 2
    return Costs(
        bytes_moved=2 * size + 8 * problem.tokens,
        bytes_communicated=2 * size * (rank.tp_size - 1) // rank.tp_size,
        flops=problem.tokens * problem.hidden,
    )


@moe.variant("two all-to-alls with as many tokens as there are", no_graph_reason="the host reads the counts")
def all_to_all(problem: Moe, inputs: dict[str, Tensor], rank: Rank) -> Callable[[], dict[str, Tensor]]:
    """Prepare an iteration. This part is not timed: allocate and compile here, but do not compute with the inputs."""
    x, expert, scale = inputs["x"], inputs["expert"], inputs["scale"]
    experts_of_rank = problem.experts // rank.tp_size

    def exchange(rows: Tensor, sizes: list[int], sizes_back: list[int]) -> Tensor:
        received = rows.new_empty(sum(sizes_back), *rows.shape[1:])
        dist.all_to_all_single(received, rows, sizes_back, sizes, group=rank.tp_group)
        return received

    def step() -> dict[str, Tensor]:
        """Run one iteration. tpbench times it, and compares what it returns with the reference."""
        order = expert.argsort()
        counts = torch.bincount(expert // experts_of_rank, minlength=rank.tp_size)
        counts_back = torch.empty_like(counts)
        dist.all_to_all_single(counts_back, counts, group=rank.tp_group)
        sizes, sizes_back = counts.tolist(), counts_back.tolist()
        rows = exchange(x[order], sizes, sizes_back)
        rows *= scale[exchange(expert[order], sizes, sizes_back), None].to(x.dtype)
        y = torch.empty_like(x)
        y[order] = exchange(rows, sizes_back, sizes)
        return {"y": y}

    return step


@moe.variant(
    "an all-gather of all tokens, then a reduce-scatter of the results",
    bytes_communicated=lambda problem, rank: (4 * problem.hidden + 8) * problem.tokens * (rank.tp_size - 1),
)
def all_gather(problem: Moe, inputs: dict[str, Tensor], rank: Rank) -> Callable[[], dict[str, Tensor]]:
    """Prepare an iteration."""
    x, expert, scale = inputs["x"], inputs["expert"], inputs["scale"]
    experts_of_rank = problem.experts // rank.tp_size
    all_x = x.new_empty(rank.tp_size * problem.tokens, problem.hidden)
    all_experts = expert.new_empty(rank.tp_size * problem.tokens)

    def step() -> dict[str, Tensor]:
        dist.all_gather_into_tensor(all_x, x, group=rank.tp_group)
        dist.all_gather_into_tensor(all_experts, expert, group=rank.tp_group)
        here = all_experts // experts_of_rank == rank.tp_rank
        results = all_x * (scale[all_experts] * here)[:, None].to(x.dtype)
        y = torch.empty_like(x)
        dist.reduce_scatter_tensor(y, results, group=rank.tp_group)
        return {"y": y}

    return step
