"""`linear_entropy_loss`: a language model's head and its entropy loss together, without the logits of all rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels.entropy import checks
from tpbench.kernels.linear.call import LinearCall, LinearEntropyLossResult, losses_of_labels
from tpbench.kernels.linear.chunks import bytes_of_row, chunks_of, workspace_gib_of
from tpbench.kernels.losses import KERNEL_LOSSES, KernelLoss
from tpbench.kernels.row_loss import Outputs, RowLoss, Scaling, shard_of_vocabulary
from tpbench.kernels.two_pass.kernels import inverse_row_count, launching
from tpbench.kernels.two_pass.state import INTERPRETED


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

    Without gradients, losses of labels need only statistics of each row. On Hopper GPUs, in bf16 and fp16, the kernel
    of the product stores these, and no logits.

    The logits and their gradient are rounded to the dtype of the factors, as by `torch.nn.functional.linear`. Results
    for other chunk sizes differ by the rounding of the products only. Each chunk rounds the sum of a weight gradient in
    bf16; a `weight_grad` in fp32 avoids that.

    Args:
        hidden: (rows, h) in bfloat16, float16 or float32, equal on all ranks. With hidden_sharded this rank's
            (rows / ranks, h): contiguous parts in rank order (sequence parallelism).
        weight: (local vocab, h), this rank's rows of the head, in the dtype of hidden.
        target: one of

            - for cross_entropy and logprob the labels of all rows, (rows,) int32 or int64, global columns;
            - for the other losses target logits, (rows, local vocab);
            - for the other losses (teacher_hidden, teacher_weight): the teacher's logits are computed in chunks too.
              They are sharded like hidden and weight. The teacher has no bias and gets no gradient. A softcap applies
              to its logits, too.
        loss: cross_entropy, soft_cross_entropy, reverse_kl, forward_kl or logprob.
        group: process group over which the vocabulary is sharded. None: this rank holds all of it.
        vocab_start: the first global column of this rank.
        vocab_size: columns of the whole vocabulary, without padding. Give it together with vocab_start; otherwise
            every call gathers the ranks' sizes, and the host waits.
        reduction: of the rows' losses: "mean" over the rows that count, "sum" or "none".
        ignore_index: the label of rows that do not count.
        logits_scale: positive factor on logits and target logits.
        temperature: positive divisor of target logits, or for logprob of the logits.
        label_smoothing: from 0 to 1, for cross_entropy.
        z_loss: factor of an additional term of each row's loss, log(sum(exp(logits_scale * logits)))^2.
        softcap: positive: logits become softcap * tanh(logits / softcap). None: no cap.
        bias: (local vocab,) in the dtype of the weight, or None.
        entropy: also compute each row's entropy.
        grad: False computes no gradients.
        grad_scale: factor on the gradients (not on the loss).
        row_grad: (rows,) fp32, factor of each row on the gradient of its loss. None: 1.
        entropy_grad: (rows,) fp32, factor of each row on the gradient of its entropy. None: 0.
        weight_grad: a tensor that the weight's gradient is added to, in the weight's dtype or in fp32, for example
            Megatron's main_grad. None: the gradient gets new memory in the weight's dtype.
        hidden_sharded: the rows of hidden are sharded over the group. Chunks are gathered, and their gradients are
            reduce-scattered. Otherwise gradients are all-reduced.
        workspace_gib: bound of the memory for logits and target logits of a chunk, or for the statistics that replace
            them, for evenly split vocabularies. A small value means small chunks, of at least one row. "auto" means
            0.5 GiB, but at least 1024 rows.
        block_cap: the largest column block of a kernel, a power of two. "auto": the fastest measured one.
        exchange: path of the rows' statistics between ranks: "symmetric" (memory shared over NVLink), "nccl" (an
            all-gather; choose it beside other streams with collectives), or "auto".

    A row that does not count contributes nothing, unless its hidden states are not finite: then 0 * inf makes the
    weight's gradient NaN, as in torch.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names the argument and what is valid.
        RuntimeError: hidden on a CPU and not in Triton's interpreter; exchange="symmetric" if it is not available; a
            rank whose peer did not answer an earlier call.
    """
    world_size = 1 if group is None else group.size()
    shards = world_size if hidden_sharded else 1
    checks.choice("loss", loss, KERNEL_LOSSES)
    checks.call_options(group, vocab_start, vocab_size, reduction, ignore_index, block_cap, exchange)
    checks.linear_tensors(hidden, weight, target, loss, bias, shards)
    checks.weight_gradient(weight_grad, weight)
    workspace_gib_of(workspace_gib)
    checks.runnable("hidden", hidden, INTERPRETED)
    checks.loss_options(loss, logits_scale, temperature, label_smoothing, z_loss, softcap, entropy, grad_scale)
    rows = len(hidden) * shards
    checks.row_gradients(row_grad, entropy_grad, rows, hidden.device, entropy)

    vocabulary = shard_of_vocabulary(len(weight), group, vocab_start, vocab_size, hidden.device, "weight")
    if loss == "logprob":
        logits_scale, temperature = logits_scale / temperature, 1.0
    has_teacher = isinstance(target, (tuple, list))
    cap = softcap or 0.0
    loss_of_row = RowLoss(
        loss, group, vocabulary, ignore_index, logits_scale, temperature, label_smoothing, z_loss, cap,
        cap if has_teacher else 0.0, block_cap, exchange, "auto",
    )  # fmt: skip
    labels_only = not grad and loss_of_row.has_labels and label_smoothing == 0 and rows > 0
    call: LinearCall | None = None
    if not labels_only:
        dtypes = [hidden.dtype, target[0].dtype] if has_teacher else [hidden.dtype]
        chunks = chunks_of(rows, shards, bytes_of_row(vocabulary.share, dtypes), workspace_gib)
        call = LinearCall(hidden, weight, bias, target, loss_of_row, chunks, grad)
    outputs = Outputs(
        torch.empty(rows, dtype=torch.float32, device=hidden.device),
        torch.empty(rows, dtype=torch.float32, device=hidden.device) if entropy else None,
        total=None if reduction == "none" else torch.zeros((), dtype=torch.float32, device=hidden.device),
    )
    scaling = Scaling.of_reduction(
        reduction, loss_of_row, rows, grad_scale=grad_scale, row_grad=row_grad, entropy_grad=entropy_grad
    )
    if scaling.count:
        assert isinstance(target, Tensor)
        with launching(hidden.device):
            counted = inverse_row_count(target.contiguous(), vocabulary.size, ignore_index)
        scaling = replace(scaling, inverse_count=counted)
    if call is None:
        assert isinstance(target, Tensor)
        return losses_of_labels(
            hidden, weight, bias, target, loss_of_row, shards, workspace_gib, outputs, scaling
        )  # fmt: skip
    return call.run(outputs, scaling, weight_grad)
