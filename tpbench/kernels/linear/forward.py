"""The computation of `linear_entropy_loss` from labels without gradients: statistics of chunks, and one exchange."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tpbench.kernels.entropy.launch_rows import How
from tpbench.kernels.linear import product_statistics
from tpbench.kernels.linear.chunks import Chunks, bytes_of_row, chunks_of
from tpbench.kernels.linear.hidden import bytes_sent, hidden_states
from tpbench.kernels.linear.label_statistics import LabelStatistics
from tpbench.kernels.linear.product_statistics import ProductStatistics
from tpbench.kernels.linear.result import LinearEntropyLossResult, LinearHow
from tpbench.kernels.row_loss import Outputs, RowLoss, Scaling
from tpbench.kernels.two_pass import launch as two_pass


def losses_of_labels(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss: RowLoss, shards: int,
    workspace_gib: float | Literal["auto"], outputs: Outputs, scaling: Scaling,
) -> LinearEntropyLossResult:  # fmt: skip
    """Compute the losses and, on request, the entropies of at least one row. All arguments are checked before.

    Where the head's product can store statistics itself, no logits are stored. Elsewhere those of a chunk are.

    shards: ranks that share the rows of the hidden states. outputs: of all rows.
    """
    rows, row_entropy = len(hidden) * shards, outputs.row_entropy
    entropy = row_entropy is not None
    fused = product_statistics.is_supported(hidden)
    columns = loss.vocabulary.share
    of_tiles, of_logits = product_statistics.bytes_of_row, bytes_of_row
    row_bytes = of_tiles(columns, entropy) if fused else of_logits(columns, [hidden.dtype])
    chunks = chunks_of(rows, shards, row_bytes, workspace_gib)
    states = hidden_states(hidden, None, loss.group, chunks)
    statistics = (ProductStatistics if fused else LabelStatistics)(loss, rows, weight, bias, entropy, chunks.most)
    in_order = chunks.in_order(labels)
    how: How | None = None
    first = 0
    for index in range(len(chunks)):
        chunk = states.chunk(index)
        states.prefetch(index + 1)  # no collective follows the product, so the next chunk is fetched beside it
        how = statistics.store(chunk, in_order[first : first + len(chunk)], first)
        first += len(chunk)
    sent = _finish(statistics, chunks, in_order, outputs)
    sent += bytes_sent(
        rows, hidden.shape[1], hidden.itemsize, loss.vocabulary.world_size, sharded=shards > 1, grad=False
    )
    workspace = statistics.memory.nbytes / 2**30
    return LinearEntropyLossResult(
        two_pass.reduced(outputs, scaling), outputs.row_loss, row_entropy, None, None, None,
        LinearHow(len(chunks), chunks.most, workspace, how, None, sent),
    )  # fmt: skip


def _finish(statistics: ProductStatistics | LabelStatistics, chunks: Chunks, in_order: Tensor, outputs: Outputs) -> int:
    """Exchange the statistics of rows in the order of chunks, and store losses and entropies in the order of rows."""
    if chunks.shards == 1:
        return statistics.finish(in_order, outputs.row_loss, outputs.row_entropy)
    losses = torch.empty_like(outputs.row_loss)
    entropies = None if outputs.row_entropy is None else torch.empty_like(outputs.row_entropy)
    sent = statistics.finish(in_order, losses, entropies)
    chunks.put_all(outputs.row_loss, losses)
    if outputs.row_entropy is not None and entropies is not None:
        chunks.put_all(outputs.row_entropy, entropies)
    return sent
