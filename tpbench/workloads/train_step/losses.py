"""Mean cross-entropy of the next tokens, from whole or vocabulary-sharded logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tpbench.workloads.train_step.gradients import local_shard
from tpbench.workloads.train_step.problem import TrainStep

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean cross-entropy, a scalar, from logits (batch, sequence, vocabulary or a shard of it) and labels (batch,
sequence)."""


def loss_of_whole_logits(problem: TrainStep) -> Loss:
    """Return the problem's loss for logits that are not sharded: torch's or tpbench's."""
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
