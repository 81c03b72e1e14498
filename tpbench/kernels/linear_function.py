"""`linear_entropy_loss`: a language model's head and its entropy loss together, without the logits of all rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels import _checks, linear_checks, two_pass
from tpbench.kernels.label_statistics import LabelStatistics
from tpbench.kernels.linear_chunks import Chunks, bytes_of_row, chunks_of, workspace_gib_of
from tpbench.kernels.linear_hidden import HiddenStates, bytes_sent, gradient_like, hidden_states
from tpbench.kernels.linear_products import Accumulation, add_product, multiply
from tpbench.kernels.losses import KERNEL_LOSSES, KernelLoss
from tpbench.kernels.row_losses import How, Outputs, RowLoss, launch_rows
from tpbench.kernels.two_pass import INTERPRETED, launching
from tpbench.kernels.vocabulary import shard_of_vocabulary


@dataclass(frozen=True)
class LinearHow:
    """The chunks and kernels of a call."""

    chunks: int
    chunk_rows: int
    """Rows of a chunk; the last one may have fewer."""
    workspace_gib: float
    """Memory for the logits of a chunk, which their gradient overwrites, and for its target logits."""
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


@torch.no_grad()
def linear_entropy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | tuple[Tensor, Tensor],
    *,
    loss: KernelLoss = "cross_entropy",
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    logits_scale: float = 1.0,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    entropy: bool = False,
    grad: bool = True,
    grad_scale: float = 1.0,
    row_grad: Tensor | None = None,
    entropy_grad: Tensor | None = None,
    weight_grad: Tensor | None = None,
    hidden_sharded: bool = False,
    workspace_gib: float | Literal["auto"] = "auto",
    block_cap: int | Literal["auto"] = "auto",
    exchange: Literal["auto", "nccl", "symmetric"] = "auto",
) -> LinearEntropyLossResult:
    """Compute the entropy loss of logits = hidden @ weight.T + bias, and the gradients of hidden, weight and bias.

    The loss is that of `tpbench.kernels.entropy_loss`, with the same formulas and edge cases. Rows are worked on in
    chunks. The logits of a chunk lie in one buffer, and their gradient overwrites them. So memory does not grow with
    the number of rows, except for the results. For each chunk:

    1. logits = hidden @ weight.T, for two-logit losses also those of the teacher
    2. the loss of the rows, and the logits' gradient in place
    3. gradient of hidden = logits' gradient @ weight; its sum over ranks starts, and runs beside the next products
    4. gradient of weight += logits' gradient.T @ hidden.

    The logits and their gradient are rounded to the dtype of the factors, as by `torch.nn.functional.linear`. Results
    for other chunk sizes differ by the rounding of the products only. Into a weight gradient in bf16 every chunk adds
    with a rounding; one in fp32 avoids that.

    Args:
        hidden: (rows, h) in bfloat16, float16 or float32, equal on all ranks. With hidden_sharded this rank's
            (rows / ranks, h), contiguous parts in rank order (sequence parallelism).
        weight: (local vocab, h), this rank's rows of the head, in the dtype of hidden.
        target: for cross_entropy and logprob the labels of all rows, (rows,). For the other losses target logits,
            (rows, local vocab), or (teacher_hidden, teacher_weight): then the teacher's logits are computed in chunks
            too. The teacher's weight is sharded like `weight`, its hidden states like `hidden`. The teacher gets no
            gradient, has no bias, and a softcap applies to its logits too.
        loss, group, vocab_start, vocab_size, reduction, ignore_index, logits_scale, temperature, label_smoothing,
            z_loss, entropy, row_grad, entropy_grad, block_cap, exchange: as for `entropy_loss`.
        softcap: positive: logits become softcap * tanh(logits / softcap). None: no cap.
        bias: (local vocab,) in the dtype of the weight, or None.
        grad: False computes no gradients.
        grad_scale: factor on the gradients (not on the loss).
        weight_grad: None allocates the weight's gradient in the weight's dtype. A tensor in that dtype or in fp32, for
            example Megatron's main_grad, is added to.
        hidden_sharded: the rows of hidden are sharded over the group. Chunks are gathered, and their gradients are
            reduce-scattered. Otherwise gradients are all-reduced.
        workspace_gib: bound of the memory for logits and target logits of a chunk, for evenly split vocabularies. A
            small value means small chunks, of at least one row. "auto" means 0.5 GiB, but at least 1024 rows.

    A row that does not count contributes nothing, unless its hidden states are not finite: then 0 * inf makes the
    weight's gradient NaN, as in torch.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names the argument and what is valid.
        RuntimeError: as for `entropy_loss`.
    """
    world_size = 1 if group is None else group.size()
    shards = world_size if hidden_sharded else 1
    _checks.choice("loss", loss, KERNEL_LOSSES)
    _checks.call_options(group, vocab_start, vocab_size, reduction, ignore_index, block_cap, exchange)
    linear_checks.tensors(hidden, weight, target, loss, bias, shards)
    linear_checks.weight_gradient(weight_grad, weight)
    workspace_gib_of(workspace_gib)
    _checks.runnable("hidden", hidden, INTERPRETED)
    _checks.loss_options(loss, logits_scale, temperature, label_smoothing, z_loss, softcap, entropy, grad_scale)
    rows = len(hidden) * shards
    _checks.row_gradients(row_grad, entropy_grad, rows, hidden.device, entropy)

    vocabulary = shard_of_vocabulary(len(weight), group, vocab_start, vocab_size, hidden.device, "weight")
    if loss == "logprob":
        logits_scale, temperature = logits_scale / temperature, 1.0
    teacher = isinstance(target, (tuple, list))
    cap = softcap or 0.0
    row_loss = RowLoss(
        loss, group, vocabulary, ignore_index, logits_scale, temperature, label_smoothing, z_loss, cap,
        cap if teacher else 0.0, block_cap, exchange, "auto",
    )  # fmt: skip
    dtypes = [hidden.dtype, target[0].dtype] if teacher else [hidden.dtype]
    chunks = chunks_of(rows, shards, bytes_of_row(vocabulary.share, dtypes), workspace_gib)
    call = _Call(hidden, weight, bias, target, row_loss, chunks, grad)
    count = reduction == "mean" and row_loss.has_labels and rows > 0
    outputs = Outputs(
        torch.empty(rows, dtype=torch.float32, device=hidden.device),
        torch.empty(rows, dtype=torch.float32, device=hidden.device) if entropy else None,
        total=None if reduction == "none" else torch.zeros((), dtype=torch.float32, device=hidden.device),
        mean=1.0 / rows if reduction == "mean" and not row_loss.has_labels and rows else 1.0,
        count=count,
        inverse_count=_inverse_count(target, row_loss) if count else None,
        grad_scale=grad_scale,
        row_grad=row_grad,
        entropy_grad=entropy_grad,
    )
    if not grad and row_loss.has_labels and label_smoothing == 0 and rows > 0:
        return call.forward(outputs)
    return call.run(outputs, weight_grad)


def _inverse_count(labels: Any, loss: RowLoss) -> Tensor:
    """Return 1 / the number of all rows that count, (1,) fp32 on the device."""
    with launching(labels.device):
        return two_pass.inverse_count(labels.contiguous(), loss.vocabulary.size, loss.ignore_index)


class _Call:
    """The inputs of one call. The first product is queued at once, so that the GPU works while the host prepares."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Any, loss: RowLoss, chunks: Chunks,
        grad: bool,
    ) -> None:  # fmt: skip
        self.hidden, self.weight, self.bias, self.target = hidden, weight, bias, target
        self.loss, self.chunks, self.grad = loss, chunks, grad
        self.grad_hidden = gradient_like(hidden) if grad else None
        self.states = hidden_states(hidden, self.grad_hidden, loss.group, chunks)
        self.logits = hidden.new_empty((chunks.most if len(chunks) else 0, len(weight)))
        """The memory that is used again for each chunk."""
        self.first = self._queue(0) if len(chunks) else None

    def _queue(self, index: int) -> tuple[Tensor, Tensor]:
        """Queue the product of a chunk. Return its hidden states and its logits."""
        hidden = self.states.chunk(index)
        if not self.grad:  # no gradient is sent: the next chunk can be fetched beside this product
            self.states.prefetch(index + 1)
        logits = self.logits[: len(hidden)]
        if self.bias is None:
            multiply(hidden, self.weight.t(), logits)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
        return hidden, logits

    def _chunk(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the hidden states and the logits of a chunk."""
        first, self.first = self.first, None
        return self._queue(index) if first is None else first

    def forward(self, outputs: Outputs) -> LinearEntropyLossResult:
        """Compute the losses of labels without gradients. Ranks exchange the statistics of all rows at once."""
        chunks, entropy = self.chunks, outputs.row_entropy
        statistics = LabelStatistics(self.loss, chunks.rows, self.hidden.device, entropy is not None)
        labels = chunks.in_order(self.target)
        how, first = None, 0
        for index in range(len(chunks)):
            _, logits = self._chunk(index)
            how = statistics.store(logits, labels[first : first + len(logits)], first)
            first += len(logits)
        if chunks.shards == 1:
            sent = statistics.finish(labels, outputs.row_loss, entropy)
        else:
            row_loss = torch.empty_like(outputs.row_loss)
            row_entropy = None if entropy is None else torch.empty_like(entropy)
            sent = statistics.finish(labels, row_loss, row_entropy)
            chunks.put_all(outputs.row_loss, row_loss)
            if entropy is not None and row_entropy is not None:
                chunks.put_all(entropy, row_entropy)
        self._reduce(outputs)
        return self._result(outputs, (None, None), LinearHow(
            len(chunks), chunks.most, self.logits.nbytes / 2**30, how, None, sent + self._hidden_bytes()
        ))  # fmt: skip

    def _reduce(self, outputs: Outputs) -> None:
        if outputs.total is not None and len(self.chunks):
            with launching(self.hidden.device):
                two_pass.reduce(outputs.row_loss, outputs.inverse_count, outputs.mean, outputs.total)

    def _result(
        self, outputs: Outputs, grads: tuple[Tensor | None, Tensor | None], how: LinearHow
    ) -> LinearEntropyLossResult:
        """grads: of weight and bias."""
        loss = outputs.row_loss if outputs.total is None else outputs.total
        return LinearEntropyLossResult(loss, outputs.row_loss, outputs.row_entropy, self.grad_hidden, *grads, how)

    def run(self, outputs: Outputs, weight_grad: Tensor | None) -> LinearEntropyLossResult:
        """Compute all chunks. `outputs` has the results of all rows."""
        weight, chunks, states, grad = self.weight, self.chunks, self.states, self.grad
        added_to = weight_grad is not None
        if grad and weight_grad is None:
            empty = torch.empty if len(chunks) else torch.zeros
            weight_grad = empty(weight.shape, dtype=weight.dtype, device=weight.device)
        grad_bias = None
        if grad and self.bias is not None:
            grad_bias = torch.zeros(self.bias.shape, dtype=torch.float32, device=weight.device)
        lift = self._lift(outputs) if grad else 1.0
        teachers = self._teachers()
        how: How | None = None
        accumulation: Accumulation | None = None
        sent = 0
        for index in range(len(chunks)):
            of_hidden, of_logits = self._chunk(index)
            of_target = self._target(index, teachers)
            states.wait()
            one = self._launch(index, of_logits, of_target, outputs, lift)
            how, sent = how or one, sent + one.bytes_sent
            if grad:
                multiply(of_logits, weight, states.gradient(index), 1.0 / lift)
                states.send_gradient(index)
                states.prefetch(index + 1)
            if teachers is not None:
                teachers.states.prefetch(index + 1)
            if weight_grad is None or not grad:
                continue
            if index == 0 and not added_to:
                multiply(of_logits.t(), of_hidden, weight_grad, 1.0 / lift)
                accumulation = "product"
            else:
                accumulation = add_product(of_logits.t(), of_hidden, weight_grad, 1.0 / lift)
            if grad_bias is not None:
                grad_bias.add_(of_logits.sum(0, dtype=torch.float32), alpha=1.0 / lift)
        states.wait()
        self._reduce(outputs)
        if grad_bias is not None and self.bias is not None:
            grad_bias = grad_bias.to(self.bias.dtype)
        how_all = LinearHow(
            len(chunks),
            chunks.most,
            (self.logits.nbytes + (0 if teachers is None else teachers.logits.nbytes)) / 2**30,
            how,
            accumulation,
            sent + self._hidden_bytes(),
        )
        return self._result(outputs, (weight_grad if grad else None, grad_bias), how_all)

    def _launch(self, index: int, logits: Tensor, target: Tensor, outputs: Outputs, lift: float) -> How:
        """Compute the loss of a chunk and, in place, the logits' gradient times `lift`."""
        take, put = self.chunks.take, self.chunks.put
        own = replace(
            outputs,
            row_loss=take(outputs.row_loss, index),
            row_entropy=None if outputs.row_entropy is None else take(outputs.row_entropy, index),
            grad=logits if self.grad else None,
            total=None,
            grad_scale=outputs.grad_scale * lift,
            row_grad=None if outputs.row_grad is None else take(outputs.row_grad, index),
            entropy_grad=None if outputs.entropy_grad is None else take(outputs.entropy_grad, index),
        )
        how = launch_rows(self.loss, logits, target, own)
        put(outputs.row_loss, own.row_loss, index)
        if outputs.row_entropy is not None and own.row_entropy is not None:
            put(outputs.row_entropy, own.row_entropy, index)
        return how

    def _teachers(self) -> _Teacher | None:
        if not isinstance(self.target, (tuple, list)):
            return None
        hidden, weight = self.target
        states = hidden_states(hidden, None, self.loss.group, self.chunks)
        return _Teacher(states, weight, hidden.new_empty((self.chunks.most if len(self.chunks) else 0, len(weight))))

    def _target(self, index: int, teachers: _Teacher | None) -> Tensor:
        if teachers is not None:
            return teachers.chunk(index)
        chunk = self.chunks.take(self.target, index)
        return chunk.contiguous() if self.loss.has_labels else chunk

    def _hidden_bytes(self) -> int:
        size, sharded = self.loss.vocabulary.world_size, self.chunks.shards > 1
        rows, item = self.chunks.rows, self.hidden.itemsize
        own = bytes_sent(rows, self.hidden.shape[1], item, size, sharded=sharded, grad=self.grad)
        if not isinstance(self.target, (tuple, list)):
            return own
        teacher = self.target[0]
        return own + bytes_sent(rows, teacher.shape[1], teacher.itemsize, size, sharded=sharded, grad=False)

    def _lift(self, outputs: Outputs) -> float:
        """Return the power of two that the gradient of fp16 logits is multiplied by, and its products divided by.

        It brings the gradient of a mean over many rows into fp16's range.
        """
        mean = outputs.count or outputs.mean != 1.0
        if self.hidden.dtype != torch.float16 or not mean or outputs.row_grad is not None:
            return 1.0
        room = min(self.chunks.rows, 2**14) / max(abs(outputs.grad_scale) * self.loss.logits_scale, 1.0)
        return float(2 ** max(0, math.floor(math.log2(max(room, 1.0)))))


@dataclass
class _Teacher:
    """The teacher's logits, chunk by chunk."""

    states: HiddenStates
    weight: Tensor
    logits: Tensor
    """(rows of a chunk, local vocab): the memory that is used again for each chunk."""

    def chunk(self, index: int) -> Tensor:
        hidden = self.states.chunk(index)
        logits = self.logits[: len(hidden)]
        multiply(hidden, self.weight.t(), logits)
        return logits
