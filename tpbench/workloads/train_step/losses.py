"""Mean cross-entropy of next tokens, from whole or vocabulary-sharded logits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.trainer import Loss


def whole(problem: TrainStep) -> Loss:
    """Of logits that are all here: torch's in fp32, or tpbench's."""
    return ours(None, 0, problem.vocab) if problem.train_loss == "tpbench" else torch_loss


def torch_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """torch's own, in fp32; of a DTensor sharded over the vocabulary under `loss_parallel()`."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def ours(group: Any, vocab_start: int, vocab: int) -> Loss:
    """tpbench's fused loss and gradient; the gradient takes the logits' memory. `group`: over which the vocabulary is
    sharded, or None; `vocab_start`: the first column held here."""
    from tpbench.kernels import EntropyLoss

    # nccl: FSDP's collectives run beside it.
    module = EntropyLoss(in_place=True, group=group, vocab_start=vocab_start, vocab_size=vocab, exchange="nccl")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = module(_local(logits).flatten(0, 1), labels.flatten())
        return result

    return loss


def loss_parallel() -> AbstractContextManager[Any]:
    """torch's context in which cross_entropy of sharded logits exchanges numbers a row instead of logits."""
    from torch.distributed.tensor import parallel

    context: AbstractContextManager[Any] = parallel.loss_parallel()
    return context


def _local(logits: Tensor) -> Tensor:
    return logits.to_local() if isinstance(logits, DTensor) else logits
