"""The logits of a linear loss, chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from tpbench.kernels.linear.chunks import Chunks
from tpbench.kernels.linear.hidden import HiddenStates
from tpbench.kernels.linear.products import multiply


class ChunkLogits:
    """The logits hidden @ weight.T + bias of one chunk at a time, in memory that all chunks share."""

    def __init__(self, states: HiddenStates, weight: Tensor, bias: Tensor | None, chunks: Chunks) -> None:
        self.states, self.weight, self.bias = states, weight, bias
        self.memory = weight.new_empty((chunks.most if len(chunks) else 0, len(weight)))

    def compute(self, index: int) -> tuple[Tensor, Tensor]:
        """Queue the product of a chunk.

        Returns the chunk's hidden states, (rows of the chunk, h), and its logits, (rows of the chunk, local vocab).
        """
        hidden = self.states.chunk(index)
        logits = self.memory[: len(hidden)]
        compute_logits(hidden, self.weight, self.bias, logits)
        return hidden, logits


def compute_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Store hidden @ weight.T + bias in `out`."""
    if bias is None:
        multiply(hidden, weight.t(), out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)
