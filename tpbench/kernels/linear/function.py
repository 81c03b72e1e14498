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
from tpbench.kernels.kernel_arguments import RowInputs, RowOutputs
from tpbench.kernels.launch_rows import launch_rows
from tpbench.kernels.linear.chunks import ChunkLogits, Chunks, chunks_of, product
from tpbench.kernels.objective import DIFFERENTIATED, RowObjective
from tpbench.kernels.row_loss import LaunchRecord, LossResult, Options, RowLoss, Rows, TopK, kernel_target, labels_of
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
    """Memory for the logits of a chunk, for its target logits and, with logits_dtype, for the logits' gradient."""
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
    clip: tuple[float, float] = (0.2, 0.2),
    ref_logprobs: Tensor | None = None,
    kl_weight: float = 0.0,
    entropy_weight: float = 0.0,
    beta: float = 0.5,
    row_weight: Tensor | None = None,
    row_inputs: Mapping[str, Tensor] | None = None,
    sequence_lengths: Sequence[int] | None = None,
    columns: Tensor | None = None,
    divisor: float | Tensor | None = None,
    logits_dtype: Literal["float32"] | None = None,
    weight_grad: Tensor | None = None,
    hidden_sharded: bool = False,
    workspace_gib: float | Literal["auto"] = "auto",
    block_cap: int | Literal["auto"] = "auto",
    exchange: Literal["auto", "nccl", "symmetric", "yielding"] = "auto",
) -> LinearEntropyLossResult:
    """Compute the entropy loss of logits = hidden @ weight.T + bias, and the gradients of hidden, weight and bias.

    The loss is that of `tpbench.kernels.entropy_loss`, with the same formulas and edge cases. Rows are worked on in
    chunks. The logits of a chunk lie in one buffer, and their gradient overwrites them. So memory does not grow with
    the number of rows, except for the results. For each chunk:

    1. logits = hidden @ weight.T, for two-logit losses also those of the teacher
    2. the loss of the rows, and the logits' gradient in place
    3. gradient of hidden = logits' gradient @ weight; its sum over ranks starts, and runs beside the next products
    4. gradient of weight += logits' gradient.T @ hidden.

    The logits and their gradient are rounded to the dtype of the factors, as by `torch.nn.functional.linear`. With
    logits_dtype="float32" the logits are not. Results for other chunk sizes differ by the rounding of the products
    only. Each chunk rounds the sum of a weight gradient in bf16; a `weight_grad` in fp32 avoids that.

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
        logits_dtype: "float32" keeps logits and target logits as the product's sums in fp32, for bf16 and fp16 factors.
            Gradients are still products in the dtype of the factors. A logit takes three times the memory, its gradient
            included, so that a chunk has a third of the rows unless workspace_gib is larger.
        weight_grad: a tensor that the weight's gradient is added to, in the weight's dtype or in fp32, for example
            Megatron's main_grad. None: the gradient gets new memory in the weight's dtype.
        hidden_sharded: the rows of hidden are sharded over the group. Chunks are gathered, and their gradients are
            reduce-scattered. Otherwise gradients are all-reduced.
        workspace_gib: bound of the memory for logits and target logits of a chunk, for evenly split vocabularies. A
            small value means small chunks, of at least one row. "auto" means 0.5 GiB, but at least 1024 rows.

    A row that does not count contributes nothing, even if its hidden states are not finite.

    A function of log-probabilities of labels alone is called after the kernel that stores their gradient. Its factors
    scale hidden states and their gradient, which rounds both once more. In fp16, with temperatures of rows, with
    exchange="nccl" or if a bias learns, it is called between two kernels.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names the argument and what is valid.
        RuntimeError: hidden on a CPU and not in Triton's interpreter; exchange="symmetric" if it is not available; a
            rank whose peer did not answer an earlier call.
    """
    arguments = locals()  # before any other variable exists
    options = Options.of_arguments(arguments)
    checks.options(options)
    shards = 1 if group is None or not hidden_sharded else group.size()
    checks.linear_tensors(hidden, weight, target, options, bias, weight_grad, grad, shards)
    n_rows, device = len(hidden) * shards, hidden.device
    numbers = checks.rows(options, arguments, n_rows, device)

    # Sequences do not end where the rows of ranks end.
    if group is not None and shards > 1 and sequence_lengths is not None:
        part = slice(group.rank() * len(hidden), (group.rank() + 1) * len(hidden))
        whole = gather_by_rank(hidden.contiguous(), group, shards).flatten(0, 1)
        result = linear_entropy_loss(**{**arguments, "hidden": whole, "hidden_sharded": False})
        return result if result.grad_hidden is None else replace(result, grad_hidden=result.grad_hidden[part].clone())

    wanted: Sequence[str] = (checks.LINEAR_INPUTS if grad else ()) if isinstance(grad, bool) else grad
    inputs = tuple(name for name in wanted if name != "bias" or bias is not None)
    of_teacher = None if isinstance(target, (Tensor, TopK)) else target
    target_softcap = None if of_teacher is None else softcap
    of_row = RowLoss.of_call(options, len(weight), device, "weight", target, target_softcap=target_softcap)
    matrices = [hidden] if of_teacher is None else [hidden, of_teacher[0]]
    dtypes = [torch.float32 if logits_dtype else states.dtype for states in matrices]
    has_gradient_memory = len(inputs) > 0 and dtypes[0] != hidden.dtype
    item_bytes = sum(dtype.itemsize for dtype in [*dtypes, *[hidden.dtype] * has_gradient_memory])
    chunks = chunks_of(n_rows, shards, of_row.vocabulary.share * item_bytes, workspace_gib, sequence_lengths)
    grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=device) if "hidden" in inputs else None
    student = ChunkLogits(hidden, weight, bias, grad_hidden, group, chunks, dtypes[0])
    grad_logits = student.memory if inputs else None
    if has_gradient_memory:
        grad_logits = weight.new_empty(student.memory.shape)
    if len(chunks):  # the GPU works while the host prepares the rest
        computed = student.compute(0)
    teacher = None if of_teacher is None else ChunkLogits(*of_teacher, None, None, group, chunks, dtypes[1])
    grad_weight = weight_grad
    if "weight" in inputs and weight_grad is None:
        grad_weight = weight.new_empty(weight.shape) if len(chunks) else weight.new_zeros(weight.shape)
    bias_sum = torch.zeros(len(weight), dtype=torch.float32, device=device) if "bias" in inputs else None

    kernels_target: Any = kernel_target(target, of_row) if isinstance(target, (Tensor, TopK)) else None
    objective = of_row.row_objective(kernels_target, arguments)
    rows = Rows.of_call(of_row, n_rows, device, numbers, divisor, objective=objective)
    if rows.count and rows.inverse_count is None:
        rows = replace(rows, inverse_count=inverse_row_count(labels_of(kernels_target), row_weight, of_row))
    stored_scale = 1.0 if not inputs or row_grad is not None else of_row.stored_scale(n_rows, weight.dtype)
    of_row = replace(of_row, grad_scale=grad_scale * stored_scale)

    # A function of log-probabilities alone has the gradient of the log-probability, times a factor for each row. The
    # kernel stores the gradient of the log-probability. The factors then scale the hidden states of the products and
    # their gradient. In fp16 these could be too small. Where two kernels run anyway, nothing is gained.
    is_alone = objective is not None and {*DIFFERENTIATED} & {*objective.objective.computed} == {"logprobs"}
    has_factors = entropy_grad is None and bias_sum is None and weight.dtype != torch.float16
    one_read = exchange != "nccl" and numbers.row_temperature is None
    run_after = is_alone and has_factors and one_read and len(inputs) > 0
    of_logprobs = replace(of_row, objective=None, algorithm="auto", grad_scale=1.0) if run_after else None

    how: LaunchRecord | None = None
    sent = 0
    for index in range(len(chunks)):
        hidden_chunk, logits = computed
        of_target = chunks.take(kernels_target, index) if teacher is None else teacher.compute(index)[1]
        student.wait()
        grad_chunk = None if grad_logits is None else grad_logits[: len(logits)]
        of_chunk = _of_chunk(rows, chunks, index, grad_chunk)
        if of_logprobs is None:
            how_chunk, factors = launch_rows(of_row, logits, of_target, of_chunk), None
        else:
            how_chunk, factors = _run_after(of_logprobs, logits, of_target, of_chunk, grad_scale)
        how, sent = how or how_chunk, sent + how_chunk.bytes_sent
        if grad_chunk is not None:
            student.send_gradient(index, grad_chunk, 1.0 / stored_scale, factors)
        student.prefetch(index + 1)
        if teacher is not None:
            teacher.prefetch(index + 1)
        if grad_weight is not None and grad_chunk is not None:
            ignored = of_row.ignored(of_target, of_chunk.inputs.row_weight)
            if ignored is not None:  # 0 * inf is NaN
                hidden_chunk = hidden_chunk.masked_fill(ignored[:, None], 0.0)
            if factors is not None:  # rows have labels, so the hidden states are a copy by now
                hidden_chunk.mul_(factors[:, None])
            beta = float(weight_grad is not None or index > 0)
            product(grad_chunk.t(), hidden_chunk, grad_weight, 1.0 / stored_scale, beta)
        if bias_sum is not None and grad_chunk is not None:
            bias_sum.add_(grad_chunk.sum(0, dtype=torch.float32), alpha=1.0 / stored_scale)
        if index + 1 < len(chunks):
            computed = student.compute(index + 1)
    student.wait()

    moved, world_size = student.moved + (0 if teacher is None else teacher.moved), student.world_size
    sent += moved * (world_size - 1) // world_size  # each part of this rank to every peer
    workspace_gib = chunks.most * len(weight) * item_bytes / 2**30
    metrics = {name: chunks.in_rows(torch.cat(each)) for name, each in objective.metrics.items()} if objective else None
    rows = replace(rows, outputs=RowOutputs(*map(chunks.in_rows, rows.outputs)))
    return LinearEntropyLossResult(
        reduced(rows, rows.inverse_count), *rows.outputs, grad_hidden, grad_weight,
        None if bias_sum is None else bias_sum.to(weight.dtype),
        LinearLaunchRecord(len(chunks), chunks.most, workspace_gib, how, sent),
        metrics=metrics,
    )  # fmt: skip


def _run_after(loss: RowLoss, logits: Tensor, target: Any, rows: Rows, scale: float) -> tuple[LaunchRecord, Tensor]:
    """Queue the kernel of the log-probabilities, then run the function. Return the factors that gradients still need.

    loss: the log-probability. scale: of the gradients. factors: (rows,) fp32.
    """
    objective: Any = rows.objective
    target = target.masked_fill(objective.ignored, -1)
    how = launch_rows(loss, logits, target, Rows(rows.outputs, RowInputs(), rows.grad))
    factor = scale * rows.mean if rows.inverse_count is None else rows.inverse_count * (scale * rows.mean)
    factors = objective.run(rows.outputs, rows.inputs, factor, True, None)[0].row_grad
    return how, factors.masked_fill(objective.ignored, 0.0)  # a function may return NaN in ignored rows


def _of_chunk(rows: Rows, chunks: Chunks, index: int, grad: Tensor | None) -> Rows:
    """Return the rows of a chunk."""
    inputs, objective = chunks.take(rows.inputs, index), rows.objective
    outputs = RowOutputs(*[None if values is None else values[chunks[index]] for values in rows.outputs])
    if objective is not None:
        tensors = {name: chunks.take(values, index) for name, values in objective.inputs.items()}
        ignored, columns = [chunks.take(values, index) for values in (objective.ignored, objective.columns)]
        lengths = chunks.lengths[index] if chunks.lengths else ()
        objective = RowObjective(objective.objective, tensors, ignored, lengths, columns, objective.metrics)
    return replace(rows, inputs=inputs, outputs=outputs, grad=grad, total=None, objective=objective)
