"""`linear_entropy_loss`: a language model's head and its entropy loss together, without the logits of all rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels import KernelLoss, checks
from tpbench.kernels.distributed import gather_by_rank
from tpbench.kernels.launch_rows import launch_rows
from tpbench.kernels.linear.chunks import HiddenStates, WeightGradient, chunks_of, multiply
from tpbench.kernels.row_loss import (
    KernelTarget,
    LaunchRecord,
    LossResult,
    Options,
    RowLoss,
    Rows,
    TopK,
    TopTarget,
    fp16_gradient_scale,
    kernel_target,
    labels_of,
)
from tpbench.kernels.row_terms import RowInputs, RowOutputs
from tpbench.kernels.two_pass.launch import inverse_row_count, reduced


@dataclass(frozen=True)
class LinearLaunchRecord:
    """A record of the chunks and the kernels that computed a linear loss, and of the memory that they used.

    `LinearHow` is its earlier name.
    """

    chunks: int
    chunk_rows: int
    """Rows of a chunk; the last one may have fewer."""
    workspace_gib: float
    """Memory for the logits of a chunk, which their gradient overwrites, and for its target logits."""
    rows: LaunchRecord | None
    """The kernels of the first chunk's loss. None for no rows."""
    bytes_sent: int
    """Bytes that this rank sent to its peers: statistics of rows, hidden states and their gradients."""


@dataclass(frozen=True)
class LinearEntropyLossResult(LossResult):
    """The result of `linear_entropy_loss`."""

    grad_hidden: Tensor | None
    """Like hidden: its gradient, summed over the ranks, times grad_scale. None, as the next two, if not computed."""
    grad_weight: Tensor | None
    """(local vocab, h): the weight's gradient times grad_scale, new, or `weight_grad` with the gradient added."""
    grad_bias: Tensor | None
    """(local vocab,): the bias's gradient times grad_scale."""
    how: LinearLaunchRecord
    """The chunks and kernels that computed the loss."""


@torch.no_grad()
def linear_entropy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | TopK | tuple[Tensor, Tensor],
    *,
    loss: KernelLoss | Callable[..., Any] = "cross_entropy",
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    logits_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    entropy: bool = False,
    correct: bool = False,
    grad: bool | Sequence[Literal["hidden", "weight", "bias"]] = True,
    grad_scale: float = 1.0,
    row_grad: Tensor | None = None,
    entropy_grad: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    advantages: Tensor | None = None,
    clip: tuple[float, float] = checks.CLIP,
    ref_logprobs: Tensor | None = None,
    kl_weight: float = 0.0,
    entropy_weight: float = 0.0,
    beta: float = 0.5,
    row_weight: Tensor | None = None,
    row_inputs: Mapping[str, Tensor] | None = None,
    sequence_lengths: Sequence[int] | None = None,
    divisor: float | Tensor | None = None,
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
    for other chunk sizes differ by the rounding of the products only. Each chunk rounds the sum of a weight gradient in
    bf16; a `weight_grad` in fp32 avoids that.

    Args:
        hidden: (rows, h) in bfloat16, float16 or float32, equal on all ranks. With hidden_sharded this rank's
            (rows / ranks, h): contiguous parts in rank order (sequence parallelism).
        weight: (local vocab, h), this rank's rows of the head, in the dtype of hidden.
        target: labels or target logits of all rows, as for `entropy_loss`. Instead of target logits also
            (teacher_hidden, teacher_weight), sharded like hidden and weight: the teacher's logits are computed in
            chunks too. The teacher has no bias and gets no gradient. A softcap applies to its logits, too.
        loss and all arguments that are not listed here: as for `entropy_loss`. grad_scale is a factor on all gradients.
            A function as the loss is called for each chunk. With sequence_lengths chunks end where sequences end, and a
            sequence that is longer than a chunk gets a larger one. Sharded hidden states are all gathered before then.
        bias: (local vocab,) in the dtype of the weight, or None.
        grad: False computes no gradients. Names, such as ("hidden",), compute the gradients of these inputs alone, and
            skip the products of the others, as for a frozen head. All ranks must pass the same.
        weight_grad: a tensor that the weight's gradient is added to, in the weight's dtype or in fp32, for example
            Megatron's main_grad. None: the gradient gets new memory in the weight's dtype.
        hidden_sharded: the rows of hidden are sharded over the group. Chunks are gathered, and their gradients are
            reduce-scattered. Otherwise gradients are all-reduced.
        workspace_gib: bound of the memory for logits and target logits of a chunk, for evenly split vocabularies. A
            small value means small chunks, of at least one row. "auto" means 0.5 GiB, but at least 1024 rows.

    A row that does not count contributes nothing, unless its hidden states are not finite: then 0 * inf makes the
    weight's gradient NaN, as in torch.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names the argument and what is valid.
        RuntimeError: hidden on a CPU and not in Triton's interpreter; exchange="symmetric" if it is not available; a
            rank whose peer did not answer an earlier call.
    """
    arguments = locals()  # before any other variable exists
    options = Options.of_arguments(arguments)
    numbers = options.row_inputs(arguments)
    checks.options(options)
    shards = 1 if group is None or not hidden_sharded else group.size()
    checks.linear_tensors(hidden, weight, target, options, bias, weight_grad, grad, shards)
    n_rows, device = len(hidden) * shards, hidden.device
    checks.row_tensors(options, numbers, n_rows, device)
    checks.divisor(options, divisor, device)
    checks.objective(options, row_inputs, sequence_lengths, n_rows, device)
    checks.workspace(workspace_gib)

    changes = {"target_softcap": softcap} if isinstance(target, (tuple, list)) else {}
    loss_of_row = RowLoss.of_call(options, len(weight), device, "weight", target, **changes)
    kernels_target: Any = target if isinstance(target, (tuple, list)) else kernel_target(target, loss_of_row)
    wanted: Sequence[str] = (checks.LINEAR_INPUTS if grad else ()) if isinstance(grad, bool) else grad
    inputs = tuple(name for name in wanted if name != "bias" or bias is not None)
    ignored = None
    if options.objective is not None:
        ignored = loss_of_row.ignored(kernels_target, row_weight)
        kernels_target = kernels_target.masked_fill(ignored, -1)
    # Sequences do not end where the rows of ranks end.
    if group is not None and shards > 1 and sequence_lengths is not None:
        part = slice(group.rank() * len(hidden), (group.rank() + 1) * len(hidden))
        whole = gather_by_rank(hidden.contiguous(), group, shards).flatten(0, 1)
        result = linear_entropy_loss(**{**arguments, "hidden": whole, "hidden_sharded": False})
        return result if result.grad_hidden is None else replace(result, grad_hidden=result.grad_hidden[part].clone())
    main = _WithLogits(
        hidden, weight, bias, kernels_target, shards, workspace_gib, loss_of_row, weight_grad, inputs, sequence_lengths
    )  # fmt: skip
    in_order, in_rows = main.chunks.in_order, main.chunks.in_rows
    rows = Rows.of_call(loss_of_row, n_rows, device, RowInputs(*map(in_order, numbers)), divisor)
    if rows.count and rows.inverse_count is None:
        rows = replace(rows, inverse_count=inverse_row_count(labels_of(kernels_target), row_weight, loss_of_row))
    computed, metrics = rows, None
    if ignored is not None:
        tensors = {name: in_order(values) for name, values in (row_inputs or {}).items()}
        computed = rows.of_objective(loss_of_row, tensors, in_order(ignored), sequence_lengths)
    how, sent = main.run(computed)
    if computed.objective is not None:
        metrics = {name: in_rows(values) for name, values in computed.objective.metrics.items()}
    outputs = map(in_rows, rows.outputs)
    record = LinearLaunchRecord(len(main.chunks), main.chunks.most, main.workspace / 2**30, how, sent)
    rows = replace(rows, outputs=RowOutputs(*outputs))
    return LinearEntropyLossResult(
        reduced(rows, rows.inverse_count), *rows.outputs, main.grad_hidden, main.weight_gradient.weight,
        main.weight_gradient.bias, record, metrics=metrics,
    )  # fmt: skip


class _ChunkLogits:
    """The logits hidden @ weight.T + bias of one chunk at a time, in memory that all chunks share."""

    def __init__(self, states: HiddenStates, weight: Tensor, bias: Tensor | None) -> None:
        self.states, self.weight, self.bias = states, weight, bias
        self.memory = weight.new_empty((states.chunks.most if len(states.chunks) else 0, len(weight)))

    def compute(self, index: int) -> tuple[Tensor, Tensor]:
        """Queue the product of a chunk.

        Returns the chunk's hidden states, (rows of the chunk, h), and its logits, (rows of the chunk, local vocab).
        """
        hidden = self.states.chunk(index)
        logits = self.memory[: len(hidden)]
        if self.bias is None:
            multiply(hidden, self.weight.t(), logits)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
        return hidden, logits


class _WithLogits:
    """A call that computes logits, losses and, on request, gradients, and the memory that its chunks share.

    The first product is queued at once, so that the GPU works while the host prepares the rest.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Any, shards: int,
        workspace_gib: float | Literal["auto"], loss: RowLoss, weight_grad: Tensor | None, inputs: tuple[str, ...],
        lengths: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """`target`: labels, logits, a top k, or the teacher's hidden states and weight."""
        self.weight, self.loss, self.has_gradient = weight, loss, bool(inputs)
        teacher = None if isinstance(target, (Tensor, TopTarget)) else target
        matrices = [hidden] if teacher is None else [hidden, teacher[0]]
        row_bytes = sum(loss.vocabulary.share * states.itemsize for states in matrices)
        self.chunks = chunks_of(len(hidden) * shards, shards, row_bytes, workspace_gib, lengths)
        self.grad_hidden = None
        if "hidden" in inputs:
            self.grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        self.states = HiddenStates(hidden, self.grad_hidden, loss.group, self.chunks)
        self.logits = _ChunkLogits(self.states, weight, bias)
        self.first = self.logits.compute(0) if len(self.chunks) else None
        has_weight = "weight" in inputs
        self.weight_gradient = WeightGradient(
            weight if has_weight else None, bias if "bias" in inputs else None, weight_grad if has_weight else None,
            len(self.chunks),
        )  # fmt: skip
        self.teacher: _ChunkLogits | None = None
        if teacher is not None:
            self.teacher = _ChunkLogits(HiddenStates(teacher[0], None, loss.group, self.chunks), teacher[1], None)
        self.target = target

    @property
    def workspace(self) -> int:
        """Bytes for the logits and the target logits of a chunk."""
        return self.logits.memory.nbytes + (0 if self.teacher is None else self.teacher.memory.nbytes)

    def run(self, rows: Rows) -> tuple[LaunchRecord | None, int]:
        """Compute the losses and gradients of all rows, which are in the order of chunks.

        Returns the kernels of the first chunk, and the bytes that this rank sent.
        """
        stored_scale = self._stored_scale(rows) if self.has_gradient else 1.0
        loss = replace(self.loss, grad_scale=self.loss.grad_scale * stored_scale)
        how: LaunchRecord | None = None
        sent = 0
        for index in range(len(self.chunks)):
            # `first` would keep this chunk's hidden states until the end.
            (hidden, logits), self.first = self.first or self.logits.compute(index), None
            target = self._target(index)
            self.states.wait()
            how_chunk = launch_rows(loss, logits, target, self._rows(rows, index, logits))
            how, sent = how or how_chunk, sent + how_chunk.bytes_sent
            if self.grad_hidden is not None:
                self.states.send_gradient(index, logits, self.weight, 1.0 / stored_scale)
            self.states.prefetch(index + 1)
            if self.teacher is not None:
                self.teacher.states.prefetch(index + 1)
            self.weight_gradient.add(logits, hidden, 1.0 / stored_scale)
        self.states.wait()
        of_teacher = 0 if self.teacher is None else self.teacher.states.bytes_sent
        return how, sent + self.states.bytes_sent + of_teacher

    def _target(self, index: int) -> KernelTarget:
        if self.teacher is not None:
            return self.teacher.compute(index)[1]
        if isinstance(self.target, Tensor):
            return self.chunks.take(self.target, index)
        return TopTarget(*(self.chunks.take(of_rows, index) for of_rows in self.target))

    def _rows(self, rows: Rows, index: int, logits: Tensor) -> Rows:
        """Return the rows of a chunk, whose gradient overwrites its logits."""
        chunk = self.chunks[index]
        inputs, outputs = (
            [None if values is None else values[chunk] for values in numbers] for numbers in (rows.inputs, rows.outputs)
        )
        grad = logits if self.has_gradient else None
        lengths = self.chunks.lengths[index] if self.chunks.lengths else ()
        objective = rows.objective and replace(rows.objective, rows=chunk, lengths=lengths)
        return replace(
            rows, inputs=RowInputs(*inputs), outputs=RowOutputs(*outputs), grad=grad, total=None, objective=objective
        )  # fmt: skip

    def _stored_scale(self, rows: Rows) -> float:
        """Return the factor on the gradient of the logits in memory, by which its products are divided.

        It is not 1 for the fp16 gradient of a mean (see `fp16_gradient_scale`).
        """
        loss = self.loss
        if self.weight.dtype != torch.float16 or loss.reduction != "mean" or rows.inputs.row_grad is not None:
            return 1.0
        name = loss.loss if loss.objective is None else "policy"
        return fp16_gradient_scale(self.chunks.rows, name, loss.grad_scale, loss.logits_scale)
