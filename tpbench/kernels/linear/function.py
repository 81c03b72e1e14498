"""`linear_entropy_loss`: a language model's head and its entropy loss together, without the logits of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels import KernelLoss, checks
from tpbench.kernels.launch_rows import How, launch_rows
from tpbench.kernels.linear.chunks import (
    Chunks,
    HiddenStates,
    WeightGradient,
    bytes_sent,
    chunks_of,
    compute_logits,
    hidden_states,
    multiply,
)
from tpbench.kernels.linear.statistics import LossesOfLabels, is_supported
from tpbench.kernels.row_loss import (
    POLICY_FACTOR,
    KernelTarget,
    Options,
    Outputs,
    RowLoss,
    Scaling,
    TopK,
    fp16_gradient_scale,
    has_labels,
    kernel_target,
    labels_of,
)
from tpbench.kernels.row_terms import RowInputs, RowOutputs
from tpbench.kernels.two_pass.launch import inverse_row_count, reduced, with_sequence_means
from tpbench.kernels.two_pass.state import INTERPRETED


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
    logprobs: Tensor | None
    """(rows,) fp32, as the next one only for loss="policy": log-probability of each label."""
    clipped: Tensor | None
    """(rows,) bool: true where the clip decides the row's loss."""
    grad_hidden: Tensor | None
    """Like hidden: its gradient, summed over the ranks, times grad_scale. None, as the next two, if not computed."""
    grad_weight: Tensor | None
    """(local vocab, h): the weight's gradient times grad_scale, new, or `weight_grad` with the gradient added."""
    grad_bias: Tensor | None
    """(local vocab,): the bias's gradient times grad_scale."""
    how: LinearHow
    """The chunks and kernels that computed the loss."""


@torch.no_grad()
def linear_entropy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | TopK | tuple[Tensor, Tensor],
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
    grad: bool | Sequence[Literal["hidden", "weight", "bias"]] = True,
    grad_scale: float = 1.0,
    row_grad: Tensor | None = None,
    entropy_grad: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    advantages: Tensor | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    ref_logprobs: Tensor | None = None,
    kl_weight: float = 0.0,
    entropy_weight: float = 0.0,
    cross_entropy_weight: float = 0.0,
    beta: float = 0.5,
    row_weight: Tensor | None = None,
    sequences: Tensor | None = None,
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

    Without gradients, losses of labels need only statistics of each row. On Hopper GPUs, in bf16 and fp16, the kernel
    of the product stores these, and no logits.

    The logits and their gradient are rounded to the dtype of the factors, as by `torch.nn.functional.linear`. Results
    for other chunk sizes differ by the rounding of the products only. Each chunk rounds the sum of a weight gradient in
    bf16; a `weight_grad` in fp32 avoids that.

    Args:
        hidden: (rows, h) in bfloat16, float16 or float32, equal on all ranks. With hidden_sharded this rank's
            (rows / ranks, h): contiguous parts in rank order (sequence parallelism).
        weight: (local vocab, h), this rank's rows of the head, in the dtype of hidden.
        target: labels or target logits of all rows, as for `entropy_loss`. Instead of target logits also
            (teacher_hidden, teacher_weight), sharded like hidden and weight: the teacher's logits are computed in
            chunks too. The teacher has no bias and gets no gradient. A softcap applies to its logits, too.
        loss, group, vocab_start, vocab_size, reduction, ignore_index, logits_scale, temperature, label_smoothing,
            z_loss, softcap, entropy, grad_scale, row_grad, entropy_grad, beta, block_cap, exchange, and the arguments
            of loss="policy": as for `entropy_loss`. grad_scale is a factor on all gradients. With sequences, the logits
            of all chunks are computed once more before, for the ratios.
        bias: (local vocab,) in the dtype of the weight, or None.
        grad: False computes no gradients. Names, such as ("hidden",), compute the gradients of these inputs alone, and
            skip the products of the others, as for a frozen head. All ranks must pass the same.
        weight_grad: a tensor that the weight's gradient is added to, in the weight's dtype or in fp32, for example
            Megatron's main_grad. None: the gradient gets new memory in the weight's dtype.
        hidden_sharded: the rows of hidden are sharded over the group. Chunks are gathered, and their gradients are
            reduce-scattered. Otherwise gradients are all-reduced.
        workspace_gib: bound of the memory for logits and target logits of a chunk, or for the statistics that replace
            them, for evenly split vocabularies. A small value means small chunks, of at least one row. "auto" means
            0.5 GiB, but at least 1024 rows.

    A row that does not count contributes nothing, unless its hidden states are not finite: then 0 * inf makes the
    weight's gradient NaN, as in torch.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names the argument and what is valid.
        RuntimeError: hidden on a CPU and not in Triton's interpreter; exchange="symmetric" if it is not available; a
            rank whose peer did not answer an earlier call.
    """
    options = Options(
        loss, group, vocab_start, vocab_size, reduction, ignore_index, logits_scale, temperature, label_smoothing,
        z_loss, softcap, entropy, grad_scale, block_cap, exchange, clip, kl_weight, entropy_weight,
        cross_entropy_weight, beta,
    )  # fmt: skip
    checks.options(options)
    shards = 1 if group is None or not hidden_sharded else group.size()
    checks.linear_tensors(hidden, weight, target, options, bias, weight_grad, grad, shards, INTERPRETED)
    rows, device = len(hidden) * shards, hidden.device
    row_inputs = RowInputs(row_grad, entropy_grad, row_weight, old_logprobs, advantages, ref_logprobs)
    checks.row_tensors(options, row_inputs, sequences, rows, device)
    if workspace_gib != "auto":
        checks.number("workspace_gib", workspace_gib, positive=True)

    if isinstance(target, TopK):
        target = target.map(Tensor.contiguous)
    loss_of_row = RowLoss.of_call(options, len(weight), device, "weight", target)
    if isinstance(target, (tuple, list)):
        loss_of_row = replace(loss_of_row, target_softcap=softcap)
    wanted: Sequence[str] = (checks.LINEAR_INPUTS if grad else ()) if isinstance(grad, bool) else grad
    inputs = tuple(name for name in wanted if name != "bias" or bias is not None)
    scaling = Scaling.of_call(loss_of_row, rows, row_inputs, sequences)
    if sequences is not None and rows:
        assert isinstance(target, Tensor)
        labels, of_logprobs = target.contiguous(), loss_of_row.of_logprobs()
        logprobs = torch.empty(rows, dtype=torch.float32, device=device)
        before = _call(hidden, weight, bias, target, of_logprobs, shards, workspace_gib, None, ())
        before.run(Outputs(RowOutputs(logprobs)), Scaling())
        scaling = with_sequence_means(loss_of_row, labels, logprobs, scaling, gradient=bool(inputs))
    call = _call(hidden, weight, bias, target, loss_of_row, shards, workspace_gib, weight_grad, inputs)
    outputs = Outputs.allocated(loss_of_row, rows, device)
    if scaling.count:
        assert isinstance(target, (Tensor, TopK))
        inverse_count = inverse_row_count(labels_of(kernel_target(target, loss_of_row)), row_weight, loss_of_row)
        scaling = replace(scaling, inverse_count=inverse_count)
    how, sent = call.run(outputs, scaling)
    gradient = call.weight_gradient
    return LinearEntropyLossResult(
        reduced(outputs, scaling.inverse_count, scaling.mean), *outputs.rows, call.grad_hidden,
        None if gradient is None else gradient.weight, None if gradient is None else gradient.bias,
        LinearHow(len(call.chunks), call.chunks.most, call.workspace / 2**30, how, sent + call.hidden_bytes()),
    )  # fmt: skip


def _call(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Any, loss: RowLoss, shards: int,
    workspace_gib: float | Literal["auto"], weight_grad: Tensor | None, inputs: tuple[str, ...],
) -> _WithLogits | LossesOfLabels:  # fmt: skip
    """Return the call that computes a loss and the gradients of `inputs`."""
    if not inputs and has_labels(loss.loss) and loss.label_smoothing == 0 and len(hidden) and is_supported(hidden):
        return LossesOfLabels(hidden, weight, bias, target, loss, shards, workspace_gib)
    return _WithLogits(hidden, weight, bias, target, loss, shards, workspace_gib, weight_grad, inputs)


class _ChunkLogits:
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


class _WithLogits:
    """A call that computes logits, losses and, on request, gradients, and the memory that its chunks share.

    The first product is queued at once, so that the GPU works while the host prepares the rest.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Any, loss: RowLoss, shards: int,
        workspace_gib: float | Literal["auto"], weight_grad: Tensor | None, inputs: tuple[str, ...],
    ) -> None:  # fmt: skip
        """`target`: labels, logits, or the teacher's hidden states and weight. `inputs`: those with gradients."""
        self.weight, self.target, self.loss, self.has_gradient = weight, target, loss, bool(inputs)
        self.matrices = [hidden, target[0]] if isinstance(target, (tuple, list)) else [hidden]
        row_bytes = sum(loss.vocabulary.share * states.itemsize for states in self.matrices)
        self.chunks = chunks_of(len(hidden) * shards, shards, row_bytes, workspace_gib)
        self.grad_hidden = None
        if "hidden" in inputs:
            self.grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        self.states = hidden_states(hidden, self.grad_hidden, loss.group, self.chunks)
        self.logits = _ChunkLogits(self.states, weight, bias, self.chunks)
        self.first = self.logits.compute(0) if len(self.chunks) else None
        self.weight_gradient: WeightGradient | None = None
        if "weight" in inputs or "bias" in inputs:
            self.weight_gradient = WeightGradient(
                weight if "weight" in inputs else None, bias if "bias" in inputs else None, weight_grad,
                len(self.chunks),
            )  # fmt: skip
        self.teacher: _ChunkLogits | None = None
        if isinstance(target, (tuple, list)):
            states = hidden_states(target[0], None, loss.group, self.chunks)
            self.teacher = _ChunkLogits(states, target[1], None, self.chunks)

    @property
    def workspace(self) -> int:
        """Bytes for the logits and the target logits of a chunk."""
        return self.logits.memory.nbytes + (0 if self.teacher is None else self.teacher.memory.nbytes)

    def run(self, outputs: Outputs, scaling: Scaling) -> tuple[How | None, int]:
        """Compute the losses and gradients. Returns the kernels of a chunk, and the bytes of statistics that were sent.

        `outputs`, `scaling`: of all rows.
        """
        states, gradient = self.states, self.weight_gradient
        stored_scale = self._stored_scale(scaling) if self.has_gradient else 1.0
        scaling = replace(scaling, grad_scale=scaling.grad_scale * stored_scale)
        how: How | None = None
        sent = 0
        for index in range(len(self.chunks)):
            # `first` would keep this chunk's hidden states until the end.
            (hidden, logits), self.first = self.first or self.logits.compute(index), None
            target = self._target(index)
            states.wait()
            how_chunk = self._launch(index, logits, target, outputs, scaling)
            how, sent = how or how_chunk, sent + how_chunk.bytes_sent
            if self.grad_hidden is not None:
                multiply(logits, self.weight, states.gradient(index), 1.0 / stored_scale)
                states.send_gradient(index)
            states.prefetch(index + 1)
            if self.teacher is not None:
                self.teacher.states.prefetch(index + 1)
            if gradient is not None:
                gradient.add(logits, hidden, 1.0 / stored_scale)
        states.wait()
        return how, sent

    def _target(self, index: int) -> KernelTarget:
        """Return the target of a chunk."""
        if self.teacher is not None:
            return self.teacher.compute(index)[1]

        def chunk(values: Tensor) -> Tensor:
            return self.chunks.take(values, index)

        target = self.target.map(chunk) if isinstance(self.target, TopK) else chunk(self.target)
        return kernel_target(target, self.loss)

    def _launch(self, index: int, logits: Tensor, target: KernelTarget, outputs: Outputs, scaling: Scaling) -> How:
        """Compute the loss of a chunk and, in place, the logits' gradient."""

        def chunk(values: Tensor | None) -> Tensor | None:
            return None if values is None else self.chunks.take(values, index)

        rows = RowOutputs(*map(chunk, outputs.rows))
        scaling = replace(scaling, inputs=RowInputs(*map(chunk, scaling.inputs)))
        how = launch_rows(self.loss, logits, target, Outputs(rows, logits if self.has_gradient else None), scaling)
        for all_rows, of_chunk in zip(outputs.rows, rows, strict=True):
            if all_rows is not None:
                self.chunks.put(all_rows, of_chunk, index)
        return how

    def _stored_scale(self, scaling: Scaling) -> float:
        """Return the factor on the gradient of the logits in memory, by which its products are divided.

        It is not 1 for the fp16 gradient of a mean (see `fp16_gradient_scale`).
        """
        is_mean = scaling.count or scaling.mean != 1.0
        if self.weight.dtype != torch.float16 or not is_mean or scaling.inputs.row_grad is not None:
            return 1.0
        factors = (scaling.grad_scale, self.loss.logits_scale, POLICY_FACTOR if self.loss.loss == "policy" else 1.0)
        return fp16_gradient_scale(self.chunks.rows, *factors)

    def hidden_bytes(self) -> int:
        """Return the bytes of hidden states and their gradients that this rank sent."""
        grads = (self.grad_hidden is not None, False)
        return sum(
            bytes_sent(self.chunks, states, self.loss.vocabulary.world_size, grad)
            for states, grad in zip(self.matrices, grads, strict=False)
        )
