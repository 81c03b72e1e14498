"""Autograd around a loss that has no gradient of its own, and numbers that calls of several projects need."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tpbench.workloads.entropy_loss.inputs import Shard
from tpbench.workloads.entropy_loss.output import Output
from tpbench.workloads.ring_bytes import bytes_of_all_reduce
from tpbench.workloads.vocabulary import IGNORED


def differentiated(logits: Tensor, loss_of: Callable[[Tensor], tuple[Tensor, Tensor | None]]) -> Output:
    """Return the mean loss, the losses of rows and the gradient of the logits by autograd.

    loss_of: returns the mean loss and, if the project computes them, the losses of rows, (tokens,).
    """
    leaf = logits.detach().requires_grad_()
    loss, row_loss = loss_of(leaf)
    (grad,) = torch.autograd.grad(loss, leaf)
    return Output(loss.detach(), None if row_loss is None else row_loss.detach(), grad)


def rows_that_count(shard: Shard) -> Tensor:
    """Return the number of rows whose label is not ignored, at least 1, as a tensor on the shard's device."""
    return (shard.target != IGNORED).sum().clamp(min=1)


def bytes_of_three_all_reduces(shard: Shard) -> int:
    """Return the bytes that a rank sends in all-reduces of each row's maximum, sum and label's logit, in fp32."""
    return bytes_of_all_reduce(3 * 4 * shard.tokens, shard.tp_size)
