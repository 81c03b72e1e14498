"""Log-probabilities in given columns of rows, for a function as the loss, and the gradient in these columns.

The kernels compute the gradient in all columns. In the label's column and in the given ones it has other terms, so that
it is computed again here, in fp32, and stored over that of the kernels: it is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tpbench.kernels.kernel_arguments import RowInputs
from tpbench.kernels.row_loss import RowLoss


@dataclass(frozen=True)
class RowColumns:
    """The label's column and k given ones of rows: (rows, 1 + k) each."""

    log_p: Tensor
    """fp32: log-probabilities, with the same bits on all ranks. NaN for a column outside of the vocabulary."""
    slope: Tensor
    """fp32: the derivative of the exponent by the logit."""
    local: Tensor
    """int64: this rank's column, 0 where another rank has it."""
    held: Tensor
    """bool: this rank has the column, and the row counts."""
    same: Tensor
    """int64: a number in the row that only equal columns share."""

    @classmethod
    def of_rows(
        cls, loss: RowLoss, logits: Tensor, gathered: Tensor, temperature: Tensor | None, labels: Tensor,
        columns: Tensor,
    ) -> RowColumns:  # fmt: skip
        """Compute the log-probabilities. Collective. gathered: all ranks' statistics. labels: -1 in rows to ignore."""
        columns = torch.cat((labels[:, None], columns), 1).long()
        counts = labels[:, None] >= 0
        outside = counts & ((columns < 0) | (columns >= loss.vocabulary.size))
        local = columns - loss.vocabulary.start
        held = counts & (local >= 0) & (local < loss.vocabulary.valid)
        local = local.where(held, 0)
        x = logits.gather(1, local).float() if logits.shape[1] else torch.zeros(columns.shape, device=logits.device)
        slope = torch.full_like(x, loss.logits_scale)
        if loss.softcap is not None:
            ratio = (x / loss.softcap).tanh()
            x, slope = loss.softcap * ratio, slope * (1.0 - ratio * ratio)
        x = x * loss.logits_scale
        if temperature is not None:
            x, slope = x / temperature[:, None], slope / temperature[:, None]
        maxima, sums = gathered[:, 0], gathered[:, 1]
        maximum = maxima.amax(0)
        log_s = (sums * (maxima - maximum).exp()).sum(0).log()
        x = (x - maximum[:, None]).where(held, 0.0)
        if loss.vocabulary.world_size > 1:
            dist.all_reduce(x, group=loss.group)
        log_p = (x - log_s[:, None]).where(counts, 0.0).masked_fill(outside, torch.nan)
        ordered, order = columns.sort(1)
        number = functional.pad((ordered[:, 1:] != ordered[:, :-1]).cumsum(1), (1, 0))
        return cls(log_p, slope, local, held, torch.empty_like(order).scatter_(1, order, number))

    def store(self, grad: Tensor, before: Any, factors: Tensor, inputs: RowInputs, entropy: Any, scale: float) -> None:
        """Store the gradient in the columns that this rank has.

        before: what it is added to, or None. factors: on the gradients of the log-probabilities. inputs: as the kernels
        received them. entropy: of rows. scale: on the gradient.
        """
        if not grad.shape[1]:
            return
        p = self.log_p.exp()
        value = torch.zeros_like(factors).scatter_add_(1, self.same, factors).gather(1, self.same)
        value -= p * inputs.row_grad[:, None]
        if inputs.entropy_grad is not None:
            of_entropy = (p * (self.log_p + entropy[:, None])).where(p > 0.0, 0.0)
            value -= of_entropy * inputs.entropy_grad[:, None]
        value *= self.slope * scale
        value = (value if before is None else value + before).to(grad.dtype)
        # A column that another rank has stands for one of this rank, or for the first column, which keeps its value.
        one = self.held.long().argmax(1, keepdim=True)
        value = value.where(self.held, value.gather(1, one)).where(self.held.any(1, keepdim=True), grad[:, :1])
        grad.scatter_(1, self.local.where(self.held, self.local.gather(1, one)), value)
