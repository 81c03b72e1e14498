"""The computation of `linear_entropy_loss`, chunk by chunk: products, losses and gradients, or statistics only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tpbench.kernels.entropy.launch_rows import How, launch_rows
from tpbench.kernels.linear.chunks import (
    Accumulation,
    Chunks,
    HiddenStates,
    WeightGradient,
    bytes_of_row,
    bytes_sent,
    chunks_of,
    compute_logits,
    hidden_states,
    multiply,
)
from tpbench.kernels.linear.statistics import LabelStatistics, ProductStatistics, bytes_of_tiles, is_supported
from tpbench.kernels.row_loss import Outputs, RowLoss, Scaling, fp16_gradient_scale
from tpbench.kernels.two_pass.kernels import reduced


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


class LinearCall:
    """The inputs of one call, and the memory that its chunks share. All arguments are checked before.

    The first product is queued at once, so that the GPU works while the host prepares the rest.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Any, loss: RowLoss, chunks: Chunks,
        grad: bool,
    ) -> None:  # fmt: skip
        """`target`: labels, target logits, or the teacher's hidden states and weight. `grad`: compute gradients."""
        self.hidden, self.weight, self.bias, self.target = hidden, weight, bias, target
        self.loss, self.chunks, self.grad = loss, chunks, grad
        self.grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if grad else None
        self.states = hidden_states(hidden, self.grad_hidden, loss.group, chunks)
        self.logits = ChunkLogits(self.states, weight, bias, chunks)
        self.teacher: ChunkLogits | None = None
        self.first = self.logits.compute(0) if len(chunks) else None

    def run(self, outputs: Outputs, scaling: Scaling, weight_grad: Tensor | None) -> LinearEntropyLossResult:
        """Compute the losses and, on request, the gradients. `outputs`, `scaling`: of all rows.

        weight_grad: the tensor to add the weight's gradient to, or None.
        """
        states, chunks = self.states, self.chunks
        gradient = WeightGradient(self.weight, self.bias, weight_grad, len(chunks)) if self.grad else None
        stored_scale = self._stored_scale(scaling) if self.grad else 1.0
        if isinstance(self.target, (tuple, list)):
            hidden, weight = self.target
            self.teacher = ChunkLogits(hidden_states(hidden, None, self.loss.group, chunks), weight, None, chunks)
        how: How | None = None
        sent = 0
        for index in range(len(chunks)):
            hidden, logits = self._product(index)
            target = self._target(index)
            states.wait()
            how_chunk = self._launch(index, logits, target, outputs, scaling, stored_scale)
            how, sent = how or how_chunk, sent + how_chunk.bytes_sent
            if gradient is not None:
                multiply(logits, self.weight, states.gradient(index), 1.0 / stored_scale)
                states.send_gradient(index)
            states.prefetch(index + 1)
            if self.teacher is not None:
                self.teacher.states.prefetch(index + 1)
            if gradient is not None:
                gradient.add(logits, hidden, 1.0 / stored_scale)
        states.wait()
        return self._result(outputs, scaling, how, sent, gradient)

    def _product(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the hidden states and the logits of a chunk."""
        first, self.first = self.first, None
        return self.logits.compute(index) if first is None else first

    def _target(self, index: int) -> Tensor:
        """Return the labels or the target logits of a chunk."""
        if self.teacher is not None:
            return self.teacher.compute(index)[1]
        chunk = self.chunks.take(self.target, index)
        return chunk.contiguous() if self.loss.has_labels else chunk

    def _launch(
        self, index: int, logits: Tensor, target: Tensor, outputs: Outputs, scaling: Scaling, stored_scale: float
    ) -> How:
        """Compute the loss of a chunk and, in place, the logits' gradient times `stored_scale`."""

        def chunk(values: Tensor | None) -> Tensor | None:
            return None if values is None else self.chunks.take(values, index)

        row_loss, row_entropy = self.chunks.take(outputs.row_loss, index), chunk(outputs.row_entropy)
        how = launch_rows(
            self.loss,
            logits,
            target,
            Outputs(row_loss, row_entropy, logits if self.grad else None),
            replace(
                scaling,
                grad_scale=scaling.grad_scale * stored_scale,
                row_grad=chunk(scaling.row_grad),
                entropy_grad=chunk(scaling.entropy_grad),
            ),
        )
        self.chunks.put(outputs.row_loss, row_loss, index)
        if outputs.row_entropy is not None and row_entropy is not None:
            self.chunks.put(outputs.row_entropy, row_entropy, index)
        return how

    def _stored_scale(self, scaling: Scaling) -> float:
        """Return the factor on the gradient of the logits in memory, by which its products are divided.

        It is not 1 for the fp16 gradient of a mean (see `fp16_gradient_scale`).
        """
        is_mean = scaling.count or scaling.mean != 1.0
        if self.hidden.dtype != torch.float16 or not is_mean or scaling.row_grad is not None:
            return 1.0
        return fp16_gradient_scale(self.chunks.rows, scaling.grad_scale, self.loss.logits_scale)

    def _result(
        self, outputs: Outputs, scaling: Scaling, how: How | None, sent: int, gradient: WeightGradient | None = None
    ) -> LinearEntropyLossResult:
        """Reduce the losses of all rows. `how`: of a chunk. `sent`: bytes of statistics that this rank sent."""
        workspace = self.logits.memory.nbytes + (0 if self.teacher is None else self.teacher.memory.nbytes)
        return LinearEntropyLossResult(
            reduced(outputs, scaling),
            outputs.row_loss,
            outputs.row_entropy,
            self.grad_hidden,
            None if gradient is None else gradient.weight,
            None if gradient is None else gradient.bias,
            LinearHow(
                chunks=len(self.chunks),
                chunk_rows=self.chunks.most,
                workspace_gib=workspace / 2**30,
                rows=how,
                weight_grad=None if gradient is None else gradient.accumulation,
                bytes_sent=sent + self._hidden_bytes(),
            ),
        )

    def _hidden_bytes(self) -> int:
        """Return the bytes of hidden states and their gradients that this rank sent."""
        world_size, sharded = self.loss.vocabulary.world_size, self.chunks.shards > 1
        rows, hidden = self.chunks.rows, self.hidden
        sent = bytes_sent(rows, hidden.shape[1], hidden.itemsize, world_size, sharded=sharded, grad=self.grad)
        if isinstance(self.target, (tuple, list)):
            teacher = self.target[0]
            sent += bytes_sent(rows, teacher.shape[1], teacher.itemsize, world_size, sharded=sharded, grad=False)
        return sent


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
    in_product = is_supported(hidden)
    columns = loss.vocabulary.share
    row_bytes = bytes_of_tiles(columns, entropy) if in_product else bytes_of_row(columns, [hidden.dtype])
    chunks = chunks_of(rows, shards, row_bytes, workspace_gib)
    states = hidden_states(hidden, None, loss.group, chunks)
    statistics = (ProductStatistics if in_product else LabelStatistics)(loss, rows, weight, bias, entropy, chunks.most)
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
        reduced(outputs, scaling), outputs.row_loss, row_entropy, None, None, None,
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
