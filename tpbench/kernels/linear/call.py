"""The computation of `linear_entropy_loss`: products, losses and gradients, chunk by chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpbench.kernels.entropy.launch_rows import How, launch_rows
from tpbench.kernels.fp16_scale import fp16_gradient_scale
from tpbench.kernels.linear.chunks import Chunks
from tpbench.kernels.linear.hidden import bytes_sent, gradient_like, hidden_states
from tpbench.kernels.linear.logits import ChunkLogits
from tpbench.kernels.linear.products import multiply
from tpbench.kernels.linear.result import LinearEntropyLossResult, LinearHow
from tpbench.kernels.linear.weight_gradient import WeightGradient
from tpbench.kernels.row_loss import Outputs, RowLoss, Scaling
from tpbench.kernels.two_pass import launch as two_pass


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
        self.grad_hidden = gradient_like(hidden) if grad else None
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

        It is not 1 for the fp16 gradient of a mean (see `fp16_scale`).
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
            two_pass.reduced(outputs, scaling),
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
