"""The logits of a linear loss, chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from tpbench.kernels.linear_chunks import Chunks
from tpbench.kernels.linear_hidden import HiddenStates
from tpbench.kernels.linear_products import multiply


class ChunkLogits:
    """The logits hidden @ weight.T + bias of one chunk at a time, in memory that all chunks share."""

    def __init__(self, states: HiddenStates, weight: Tensor, bias: Tensor | None, chunks: Chunks) -> None:
        self.states, self.weight, self.bias = states, weight, bias
        self.memory = weight.new_empty((chunks.most if len(chunks) else 0, len(weight)))

    def compute(self, index: int, *, prefetch: bool = False) -> tuple[Tensor, Tensor]:
        """Queue the product of a chunk.

        Returns the chunk's hidden states, (rows of the chunk, h), and its logits, (rows of the chunk, local vocab).
        prefetch: start to fetch the next chunk's hidden states beside the product.
        """
        hidden = self.states.chunk(index)
        if prefetch:
            self.states.prefetch(index + 1)
        logits = self.memory[: len(hidden)]
        if self.bias is None:
            multiply(hidden, self.weight.t(), logits)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
        return hidden, logits
