"""Transfers of the other parameters of a model, among which the exchange takes place."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tpbench.comm import collectives
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs


class OtherParameters:
    """Parameters of one size, each sharded over all ranks. Their transfers use the exchange's process group."""

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        problem, ranks = inputs.problem, inputs.partition.world_size
        dtype = inputs.grad.dtype
        shard = max(1, round(problem.other_mib * 2**20 / dtype.itemsize / ranks))
        self.group = inputs.group
        self.count = problem.other_count
        self.whole = torch.zeros(self.count, ranks * shard, dtype=dtype, device=inputs.device)
        """The gradients, then the parameters: only the times of their transfers matter."""
        self.shards = torch.zeros(self.count, shard, dtype=dtype, device=inputs.device)

    def gather(self, number: int) -> Any:
        """Start the all-gather of a parameter and return its work."""
        return collectives.all_gather(self.whole[number], self.shards[number], group=self.group, async_op=True)

    def scatter(self, number: int) -> Any:
        """Start the reduce-scatter of a parameter's gradient and return its work."""
        return collectives.reduce_scatter(
            self.shards[number], self.whole[number], op=dist.ReduceOp.AVG, group=self.group, async_op=True
        )
