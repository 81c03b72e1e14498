"""The result of `linear_entropy_loss`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tpbench.kernels.entropy.launch_rows import How
from tpbench.kernels.linear.products import Accumulation


@dataclass(frozen=True)
class LinearHow:
    """This record says in which chunks and by which kernels a linear loss was computed, and which memory it used."""

    chunks: int
    chunk_rows: int
    """Rows of a chunk; the last one may have fewer."""
    workspace_gib: float
    """Memory for the logits of a chunk, which their gradient overwrites, and for its target logits. If no logits are
    stored: for the statistics of their tiles."""
    rows: How | None
    """The kernels of the first chunk's loss. None for no rows."""
    weight_grad: Accumulation | None
    """The way in which the weight's gradient was accumulated. None if there is none."""
    bytes_sent: int
    """Bytes that this rank sent to its peers: statistics of rows, hidden states and their gradients."""


@dataclass(frozen=True)
class LinearEntropyLossResult:
    """The result of `linear_entropy_loss`."""

    loss: Tensor
    """fp32 scalar, or (rows,) with reduction="none". Every rank of the group has the same bits."""
    row_loss: Tensor
    """(rows,) fp32: each row's loss (or log-probability), 0 for a row that does not count."""
    entropy: Tensor | None
    """(rows,) fp32: entropy of each row's distribution in nats. None without `entropy=True`."""
    grad_hidden: Tensor | None
    """Like hidden: its gradient, summed over the ranks, times grad_scale."""
    grad_weight: Tensor | None
    """(local vocab, h): the weight's gradient times grad_scale, new, or `weight_grad` with the gradient added."""
    grad_bias: Tensor | None
    """(local vocab,): the bias's gradient times grad_scale."""
    how: LinearHow
    """The chunks and kernels that computed the loss."""
