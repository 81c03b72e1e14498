"""Exchanges of the whole table."""

from __future__ import annotations

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.exchanges import Exchange, ExchangeContext, Phase
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad


class DenseReduceScatter(Exchange):
    """Reduce-scatter: each owner gets its part of the mean, as a sharded optimizer needs it."""

    chosen = "dense"

    def __init__(self, problem: EmbeddingGrad, context: ExchangeContext) -> None:
        super().__init__(context.inputs, context.comm)
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


class DenseAllReduce(Exchange):
    """All-reduce in place: every rank gets the whole mean, as unsharded data parallelism needs it."""

    chosen = "dense"

    def __init__(self, problem: EmbeddingGrad, context: ExchangeContext) -> None:
        super().__init__(context.inputs, context.comm)
        self.overwrites = context.inputs.grad
        self.phases = (Phase("reduce", lambda: self.comm.all_reduce_mean(self.inputs.grad)),)
