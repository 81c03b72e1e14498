"""Dense collectives, which send the whole table."""

from __future__ import annotations

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.exchanges.base import Exchange, Phase
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.traffic import formulas
from tpbench.workloads.embedding_grad.traffic.counted_collectives import CountedCollectives


class DenseReduceScatter(Exchange):
    """Reduce-scatter: each owner gets its part of the mean, as a sharded optimizer needs it."""

    chosen = "dense"

    def __init__(self, inputs: EmbeddingGradInputs, comm: CountedCollectives) -> None:
        super().__init__(inputs, comm)
        self.output: Tensor | None = None
        self.phases = (Phase("reduce", self.reduce),)

    def reduce(self) -> None:
        """Run the collective."""
        self.output = torch.empty_like(self.inputs.own_slice)
        self.comm.reduce_scatter_mean(self.output, self.inputs.grad)

    def result(self) -> Tensor:
        assert self.output is not None
        return self.output

    def release(self) -> None:
        self.output = None

    def expected_bytes(self) -> list[int]:
        size = self.comm.world_size
        return [formulas.dense_reduce_scatter(len(self.inputs.grad), self.inputs.row_bytes, size)] * size


class DenseAllReduce(Exchange):
    """All-reduce in place: every rank gets the whole mean, as unsharded data parallelism needs it."""

    chosen = "dense"

    def __init__(self, inputs: EmbeddingGradInputs, comm: CountedCollectives) -> None:
        super().__init__(inputs, comm)
        self.overwrites = inputs.grad
        self.phases = (Phase("reduce", lambda: comm.all_reduce_mean(inputs.grad)),)

    def expected_bytes(self) -> list[int]:
        size = self.comm.world_size
        return [formulas.dense_all_reduce(len(self.inputs.grad), self.inputs.row_bytes, size)] * size
