"""fast_exchange: average an embedding's gradient over data-parallel ranks, of which each owns a part of the rows."""

import torch
from torch import Tensor

from tpbench.api.embedding_grad import EmbeddingGrad, Exchange, ExchangeContext, Phase, variant


class FastExchange(Exchange):
    """Reduce-scatter of the whole table. A faster exchange sends only the rows that some token touched."""

    chosen = "dense"

    def __init__(self, context: ExchangeContext) -> None:
        """Prepare an exchange. This part is not timed: allocate buffers here."""
        super().__init__(context.inputs, context.comm)
        self.output: Tensor | None = None
        # The phases run in this order. tpbench times all of them together, then each alone.
        self.phases = (Phase("reduce", self.reduce),)

    def reduce(self) -> None:
        """Run the collective. `comm` has collectives that count the bytes they send, and `count` for others."""
        # inputs.grad: (padded rows, width). inputs.own_slice: the rows that this rank owns.
        self.output = torch.empty_like(self.inputs.own_slice)
        self.comm.reduce_scatter_mean(self.output, self.inputs.grad)

    def result(self) -> Tensor:
        """Return the mean gradient of the rows that this rank owns. tpbench compares it with an oracle."""
        assert self.output is not None
        return self.output

    def release(self) -> None:
        """Free the memory of the last iteration."""
        self.output = None


@variant("reduce-scatter of the whole table", workload="embedding_grad")
def fast_exchange(problem: EmbeddingGrad, context: ExchangeContext) -> Exchange:
    """Return the exchange of this rank."""
    return FastExchange(context)
