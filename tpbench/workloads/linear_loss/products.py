"""The matrix products of a problem alone: the time that every implementation is compared with."""

from __future__ import annotations

import torch

from tpbench.workloads.linear_loss.inputs import Shard
from tpbench.workloads.linear_loss.problem import LinearLoss

MOST_ROWS = 8192
"""Rows of a product. More rows are worked on in chunks, so that the logits of any number of tokens fit."""


class Products:
    """The products of logits, hidden states' gradient and weight's gradient, with their operands in place."""

    def __init__(self, problem: LinearLoss, shard: Shard) -> None:
        self.problem, self.shard = problem, shard
        self.rows = min(problem.tokens, MOST_ROWS)
        hidden = shard.hidden
        self.hidden = hidden.repeat(-(-self.rows // len(hidden)), 1)[: self.rows].contiguous()
        self.logits = torch.empty(self.rows, shard.columns, dtype=hidden.dtype, device=hidden.device)
        self.grad = self.logits
        if problem.trains:
            # Probabilities of this shard, like those in a step: the power of a product depends on its numbers.
            torch.mm(self.hidden, shard.weight.t(), out=self.logits)
            self.grad = torch.softmax(self.logits, dim=1)
        trained = (self.hidden, shard.weight) if problem.trains else ()
        self.outputs = tuple(torch.empty_like(each) for each in trained)

    @property
    def bytes_of_outputs(self) -> tuple[int, ...]:
        """Bytes of the gradients that a step of a variant allocates: hidden states, and weight without main_grad."""
        if not self.problem.trains:
            return ()
        weight = 0 if self.problem.main_grad else self.shard.weight.nbytes
        return (self.shard.hidden.nbytes, weight)

    def run(self) -> None:
        """Queue the products of all rows."""
        weight = self.shard.weight
        for first in range(0, self.problem.tokens, self.rows):
            rows = slice(0, min(self.rows, self.problem.tokens - first))
            torch.mm(self.hidden[rows], weight.t(), out=self.logits[rows])
            if self.shard.teacher is not None:
                torch.mm(self.hidden[rows], self.shard.teacher[1].t(), out=self.logits[rows])
            if self.problem.trains:
                hidden_grad, weight_grad = self.outputs
                torch.mm(self.grad[rows], weight, out=hidden_grad[rows])
                torch.mm(self.grad[rows].t(), self.hidden[rows], out=weight_grad)
