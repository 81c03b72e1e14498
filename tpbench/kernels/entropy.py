"""`entropy_loss`: the entropy loss and its gradient over a vocabulary sharded across tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels import KernelLoss, checks
from tpbench.kernels.launch_rows import launch_rows
from tpbench.kernels.repeated_call import overwrite, repeating
from tpbench.kernels.row_loss import LaunchRecord, LossResult, Options, RowLoss, Rows, TopK, kernel_target


@dataclass(frozen=True)
class EntropyLossResult(LossResult):
    """The result of `entropy_loss`."""

    grad: Tensor | None
    """(rows, local vocab): gradient of the (reduced) loss with respect to the local logits, times grad_scale."""
    how: LaunchRecord
    """The algorithm and the kernels that computed the loss, and the bytes that this rank sent to other ranks."""


@repeating
def entropy_loss(
    logits: Tensor,
    target: Tensor | TopK,
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
    entropy: bool = False,
    correct: bool = False,
    grad: Literal["new", "in_place", "none"] | Tensor = "new",
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
    block_cap: int | Literal["auto"] = "auto",
    exchange: Literal["auto", "nccl", "symmetric", "yielding"] = "auto",
    algorithm: Literal["auto", "two_reads", "two_kernels", "one_read"] = "auto",
) -> EntropyLossResult:
    """Compute the loss of each row and, in the same call, the gradient with respect to the local logits.

    Notation: x = logits_scale * logits, p = softmax(x), t = logits_scale / temperature * target, and q = softmax(t).
    With a softcap c, c * tanh(logits / c) takes the place of the logits (Gemma 2, arXiv:2408.00118, section 2).
    Each softmax is over the whole vocabulary of V = vocab_size columns. A row's loss is

    - cross_entropy: (1 - e) * -log p[label] + e * mean(-log p), with e = label_smoothing (Szegedy et al. 2016,
      arXiv:1512.00567, section 7). Gradient by x: p - (1 - e) * onehot(label) - e / V.
    - soft_cross_entropy: -sum(q log p), gradient p - q (Hinton et al. 2015, arXiv:1503.02531, equation 2).
    - forward_kl: KL(q || p) = sum(q (log q - log p)), gradient p - q (Kullback and Leibler 1951,
      doi:10.1214/aoms/1177729694, equation 2.4). The loss of soft_cross_entropy is larger by the entropy of q.
    - reverse_kl: KL(p || q) = sum(p (log p - log q)), gradient p * (log p - log q - KL(p || q)) (for language models
      Gu et al. 2023, arXiv:2306.08543, equation 1).
    - jsd: beta * KL(q || m) + (1 - beta) * KL(p || m), m = beta * q + (1 - beta) * p (the generalised Jensen-Shannon
      divergence of Agarwal et al. 2023, arXiv:2306.13649, section 3.1). Gradient by x:
      (1 - beta) * p * (log p - log m - KL(p || m)).
    - total_variation: sum(|p - q|) / 2 (Levin, Peres and Wilmer 2009, Markov Chains and Mixing Times, section 4.1).
      Gradient by x: p * (sign(p - q) - sum(p * sign(p - q))) / 2, with the sign 0 where p equals q.
    - logprob: no loss but log p[label], the label's log-probability, with x = logits_scale / temperature * logits.
      Gradient by x: onehot(label) - p.
    - policy: -min(ratio * A, clip(ratio) * A) + kl_weight * (exp(r) - r - 1) - entropy_weight * entropy, with the ratio
      exp(log p[label] - old_logprobs), A = advantages, the ratio clipped to [1 - clip[0], 1 + clip[1]], and
      r = ref_logprobs - log p[label] (PPO, arXiv:1707.06347; GRPO, arXiv:2402.03300).
      x = logits_scale / temperature * logits, as for logprob.

    Against a `TopK`, with K the k columns, soft_cross_entropy and forward_kl have q = softmax(t over K), which is 0
    elsewhere. reverse_kl compares softmax(x over K) with that q. With tail="bucket" the values are log q as they are,
    and the columns outside of K are one more column: p and q of it are 1 - sum over K, but at least 2^-24.

    A function as the loss makes the row's loss of log p[label] and the row's entropy: see tpbench/docs/objectives.md.

    The entropy of a row is -sum(p log p). Its gradient by x is -p * (log p + entropy).

    Each loss has the additional term z_loss * log(sum(exp(x)))^2, with gradient 2 * z_loss * log(sum(exp(x))) * p
    (PaLM, arXiv:2204.02311, section 5). The gradient is also scaled by logits_scale, by the reduction and by
    grad_scale, in fp32, and rounded once.

    Ranks exchange a few fp32 numbers per row, once (Milakov and Gimelshein 2018, arXiv:1805.02867), and merge them in
    one order, so the loss has the same bits on all of them. The host does not wait for the device (except as described
    at vocab_start), so a CUDA graph can capture the call. `tpbench.kernels.EntropyLoss` is the autograd operation.

    Args:
        logits: (rows, local vocab) in bfloat16, float16 or float32, with any strides. On a GPU, or on a CPU in Triton's
            interpreter.
        target: for cross_entropy and logprob the labels, (rows,) int32 or int64, global columns, equal on all ranks. A
            row does not count if its label is ignore_index or no column of the vocabulary: its loss and gradient are
            zero, and its logits are not read. For the other losses the target logits, with the shape of the logits. For
            soft_cross_entropy, forward_kl and reverse_kl also a `TopK`, with which rows count as with labels.
        group: process group over which the vocabulary is sharded, contiguous in rank order. None: this rank holds all
            of it.
        vocab_start: the first global column of this rank. By default it follows from the ranks' local sizes. Unless
            both vocab_start and vocab_size are given on all ranks, every call gathers the sizes, and the host waits.
        vocab_size: columns of the whole vocabulary. Columns at or past it are padding: outside the softmax, and with a
            zero gradient. By default all columns of all ranks.
        reduction: of the rows' losses: "mean" over the rows that count (0 if none does), "sum" or "none".
        logits_scale, temperature: positive. logits_scale is at most 1e6, and the temperature at least 1e-6 *
            logits_scale: with less, exponents of logits near 1000 leave the range of fp32. The temperature softens the
            target logits only. It divides the logits for logprob, policy and a function, and may be (rows,) fp32 for
            these, equal on all ranks.
        softcap: positive, or None for no cap. It does not apply to target logits.
        entropy: also compute each row's entropy. correct: for losses of labels, also compute whether the label has the
            largest logit of its row. Equal logits count as correct.
        grad: "new" allocates a tensor like the logits. "in_place" overwrites the logits. "none" computes no gradient. A
            tensor shaped like the logits, of any supported dtype, is added to in fp32. Autograd records the
            overwriting. A later backward that needs the overwritten values raises RuntimeError.
        grad_scale: factor on the gradient (not on the loss), for example of a loss scaler or of gradient accumulation.
        row_grad, entropy_grad: (rows,) fp32: factors of each row on the gradient of its loss (1 by default) and of its
            entropy (0 by default, without the factor of the reduction), such as upstream gradients.
        old_logprobs, advantages, ref_logprobs, clip, kl_weight, entropy_weight: of loss="policy" only. Tensors are
            (rows,) fp32, and equal on all ranks.
        row_weight: (rows,) fp32, equal on all ranks, a factor on each row's loss, 1 by default: a mask, or 1 / length
            of the sequence. The mean divides by its sum over the rows that count, and is 0 if that sum is 0. A row of
            weight 0 does not count, and is not read.
        row_inputs, sequence_lengths: of a function as the loss only. The tensors of rows that it takes, by name, (rows,
            ...) of any dtype, and the lengths of the sequences that it needs whole, in the order of rows.
        columns: (rows, k) int64 or int32, equal on all ranks: the global columns of `column_logprobs`, for a function
            that takes these.
        divisor: a number or a 0-dim tensor, for reduction="sum". It divides the loss and, in fp32, the gradient.
        beta: the weight of q in the mixture of loss="jsd", above 0 and below 1. Jsd and total_variation need both
            softmaxes first, so ranks exchange numbers of a row twice.
        block_cap: the largest column block of a kernel, a power of two; a block has at least 16 bytes for each thread.
            "auto" takes the fastest measured one (`block_caps`). Nothing is tuned in the call, and all ranks choose the
            same.
        exchange: the path of the statistics between ranks. On one rank nothing is exchanged: "nccl" is
            algorithm="two_reads" there, the others are "one_read" if it fits.

            - "symmetric": inside one kernel, which reads each logit once, through memory that the ranks share over
              NVLink. The ranks set it up together on a group's first use. The kernel occupies the whole GPU until all
              ranks have answered: a collective of another stream that only one rank started would block it.
            - "yielding": the same, but a program that has waited 60 us leaves its rows to a later kernel. Choose it if
              collectives of other streams may run at the same time, for example FSDP's. It is "nccl" for jsd and
              total_variation, and if the ranks are not GPUs of one machine that reach each other's memory.
            - "nccl": between two kernels, by one all-gather through the group's backend (gloo on a CPU).
            - "auto": as "yielding", and "symmetric" if at the group's first call no rank had another process group of
              several ranks.

            Two kernels run, for any exchange, with a function as the loss, temperatures of rows, a grad to accumulate
            into, a softcap above 64, an entropy or a softcap against a `TopK`, targets of another dtype, very long
            rows, or a rank with far more columns than its share. For jsd and total_variation they are three. `how` says
            what ran. If vocab_start and vocab_size are given, ranks do not know each other's columns, and such a rank
            raises.
        algorithm: the kernels.

            - "two_reads": one kernel whose programs read their row twice, for its statistics and for its gradient. On
              one rank only.
            - "two_kernels": the first kernel stores each row's statistics, so that the second reads the logits once.
            - "one_read": one persistent kernel that reads each logit once in all. Over several ranks it needs
              exchange="symmetric" or "yielding".
            - "auto": the exchange decides.

    A row whose logits are all -inf has no softmax: its loss and gradient are NaN. A positive weight on a probability of
    zero makes the loss infinite, which is correct. The gradient of reverse_kl is then NaN.

    Raises:
        TypeError, ValueError: an argument is invalid, or an algorithm that was asked for by name does not support the
            call. The message names the argument and what is valid.
        RuntimeError: logits on a CPU and not in the interpreter; exchange="symmetric" if it is not available; a
            rank whose peer did not answer an earlier call (that call's loss is NaN).
    """
    arguments = locals()  # before any other variable exists
    options = Options.of_arguments(arguments)
    checks.options(options)
    checks.entropy_tensors(logits, target, options, grad)
    n_rows, device = len(logits), logits.device
    inputs = checks.rows(options, arguments, n_rows, device)

    logits = logits.detach()
    loss_of_row = RowLoss.of_call(options, logits.shape[1], device, "logits", target)
    of_target = kernel_target(target, loss_of_row)
    objective = loss_of_row.row_objective(of_target, arguments)
    gradient = None
    if isinstance(grad, Tensor) or grad == "in_place":
        gradient = overwrite(grad if isinstance(grad, Tensor) else logits)
    elif grad == "new":
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows = Rows.of_call(loss_of_row, n_rows, device, inputs, divisor, gradient, isinstance(grad, Tensor), objective)
    how = launch_rows(loss_of_row, logits, of_target, rows)
    metrics = None if objective is None else {name: values for name, (values,) in objective.metrics.items()}
    loss_of_call = rows.outputs.loss if rows.total is None else rows.total
    return EntropyLossResult(loss_of_call, *rows.outputs, rows.grad, how, metrics=metrics)
