"""Mean cross-entropy of the next tokens, from whole or vocabulary-sharded logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpbench.workloads.sizes import IGNORED
from tpbench.workloads.train_step.problem import TrainStep

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean cross-entropy, a scalar, from the output of the model's head and labels (batch, sequence). The output is the
logits, (batch, sequence, vocabulary or a shard of it). For `tpbench_linear_loss` it is the hidden states."""


def loss_of_whole_logits(problem: TrainStep, model: Any) -> Loss:
    """Return the problem's loss for a model whose head is not sharded."""
    if problem.train_loss == "tpbench_linear":
        return tpbench_linear_loss(problem, model, model.lm_head, None, 0)
    return tpbench_loss(None, 0, problem.vocab) if problem.train_loss == "tpbench" else torch_loss


def torch_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute torch's cross-entropy in fp32. Under torch's `loss_parallel()`, the logits may be a DTensor that is
    sharded over the vocabulary."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def tpbench_loss(group: Any, vocab_start: int, vocab: int) -> Loss:
    """Return tpbench's fused loss and gradient. The gradient overwrites the logits.

    `group` shards the vocabulary, or is None; `vocab_start` is the first column on this rank.
    """
    from tpbench.kernels import EntropyLoss

    # exchange="nccl" because FSDP's collectives run at the same time.
    module = EntropyLoss(in_place=True, group=group, vocab_start=vocab_start, vocab_size=vocab, exchange="nccl")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = module(local_shard(logits).flatten(0, 1), labels.flatten())
        return result

    return loss


def tpbench_linear_loss(
    problem: TrainStep, model: Any, head: Any, group: Any, vocab_start: int, *, hidden_sharded: bool = False
) -> Loss:
    """Return tpbench's loss of hidden states and the head's weight, which works in chunks of tokens.

    The head then returns its input and computes nothing. Its parameters are those of its latest forward pass, in which
    FSDP gathers them. If the model caps its logits, so does the loss. `group` shards the vocabulary, or is None;
    `vocab_start` is the first column on this rank. With `hidden_sharded` each rank has an equal part of the tokens, in
    rank order; rows behind the last token do not count.
    """
    from tpbench.kernels import LinearEntropyLoss

    # exchange="nccl" because FSDP's collectives run at the same time.
    module = LinearEntropyLoss(
        group=group, vocab_start=vocab_start, vocab_size=problem.vocab, hidden_sharded=hidden_sharded, exchange="nccl",
        softcap=getattr(model.config, "final_logit_softcapping", None),
    )  # fmt: skip
    dtype = getattr(torch, problem.dtype)
    latest: list[Any] = []

    def forward(hidden: Tensor) -> Tensor:
        parameters = getattr(head, "local_parameters", (head.weight, getattr(head, "bias", None)))
        latest[:] = (tensor if tensor is None else local_shard(tensor) for tensor in (hidden, *parameters))
        return hidden

    head.forward = forward

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        hidden, weight, *bias = latest
        latest.clear()
        # Under autocast, parameters are in fp32 and the product is in `dtype`.
        factors = [tensor if tensor is None else tensor.to(dtype) for tensor in (hidden.flatten(0, 1), weight, *bias)]
        rows = hidden.shape[:-1].numel() * (group.size() if hidden_sharded else 1)
        if padding := rows - labels.numel():
            labels = F.pad(labels.flatten(), (0, padding), value=IGNORED)
        result: Tensor = module(*factors[:2], labels.flatten(), *factors[2:])
        return result

    return loss


def local_shard(value: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor is returned as it is."""
    return value.to_local() if isinstance(value, DTensor) else value
