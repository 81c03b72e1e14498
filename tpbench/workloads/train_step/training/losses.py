"""The losses of a train step (`train_loss`): of the head's logits, or of hidden states and the head's weight."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from tpbench.comm.collectives import exchanged
from tpbench.comm.parallel_linears import sum_over_ranks
from tpbench.workloads.train_step.problem import TrainStep

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean cross-entropy, a scalar, from the output of the model's head and labels (batch, sequence). The output is the
logits, (batch, sequence, vocabulary or a shard of it), unless the loss is one of hidden states."""


def loss_of(
    problem: TrainStep, model: Any, group: Any = None, vocab_start: int = 0, *, hidden_sharded: bool = False
) -> Loss:
    """Return the problem's loss of a model.

    `group` shards the head and the vocabulary, or is None. `vocab_start` is the first column on this rank. With
    `hidden_sharded` each rank has an equal part of the head's tokens, in rank order.
    """
    if problem.train_loss == "torch":
        return torch_loss
    # exchange="auto" is safe beside FSDP's collectives: it is "yielding" if a rank has another process group.
    shard = {"group": group, "vocab_start": vocab_start, "vocab_size": problem.vocab}
    if problem.train_loss == "tpbench_linear":
        from tpbench.kernels import LinearEntropyLoss

        return _of_hidden_states(problem, model, LinearEntropyLoss(hidden_sharded=hidden_sharded, **shard))
    if problem.train_loss == "liger" and group is None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()
        return _of_hidden_states(problem, model, lambda hidden, weight, labels: fused(weight, hidden, labels))
    of_rows: Callable[[Tensor, Tensor], Tensor]
    if problem.train_loss == "liger":
        from liger_kernel.transformers import LigerVocabParallelCrossEntropy

        sharded = LigerVocabParallelCrossEntropy()

        def of_rows(logits: Tensor, labels: Tensor) -> Tensor:
            losses: Tensor = sharded(logits[:, None], labels[:, None], group)
            return losses.mean()

    elif problem.train_loss == "compiled":
        of_rows = _compiled_loss(group, vocab_start)
    else:
        from tpbench.kernels import EntropyLoss

        of_rows = EntropyLoss(in_place=True, **shard)
    return lambda logits, labels: of_rows(local_shard(logits).flatten(0, 1), labels.flatten())


def torch_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute torch's cross-entropy in fp32. Under torch's `loss_parallel()`, the logits may be a DTensor that is
    sharded over the vocabulary."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _compiled_loss(group: Any, vocab_start: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss whose passes over the logits are compiled. Ranks exchange a maximum and two sums of each row."""

    def of_shard(logits: Tensor, local_labels: Tensor) -> tuple[Tensor, Tensor]:
        x = logits.float()
        # A comparison, in place of a gather: the compiler fuses its backward pass with that of the other result.
        at_label = torch.arange(x.shape[1], device=x.device) == local_labels[:, None]
        return x.logsumexp(-1), torch.where(at_label, x, 0.0).sum(-1)

    compiled: Any = torch.compile(of_shard, fullgraph=True, dynamic=False)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        log_sums, label_logits = compiled(logits, labels - vocab_start)
        losses: Tensor = log_sums - label_logits
        if group is None:
            return losses.mean()
        maxima = log_sums.detach().clone()
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        parts = torch.stack(((log_sums - maxima).exp(), label_logits))
        # All ranks compute the same loss from these sums, so each has the whole gradient of its part.
        sums, at_labels = exchanged(parts, group, sum_over_ranks, lambda gradient, _: gradient)
        losses = maxima + sums.log() - at_labels
        return losses.mean()

    return loss


def _of_hidden_states(problem: TrainStep, model: Any, function: Callable[..., Tensor]) -> Loss:
    """Return the loss `function(hidden, weight, labels)` of hidden states (rows, width), and let the head compute
    nothing: it then returns its input.

    The head's weight is that of its latest forward pass, in which FSDP gathers it.
    """
    head, dtype = model.lm_head, getattr(torch, problem.dtype)
    latest: list[Tensor] = []  # the hidden states and the weight

    def forward(hidden: Tensor) -> Tensor:
        (weight,) = getattr(head, "local_parameters", (head.weight,))
        latest[:] = local_shard(hidden), local_shard(weight)
        return hidden

    head.forward = forward

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        # Under autocast, parameters are in fp32 and the product is in `dtype`.
        hidden, weight = (tensor.to(dtype) for tensor in latest)
        latest.clear()
        return function(hidden.flatten(0, 1), weight, labels.flatten())

    return loss


def local_shard(value: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor is returned as it is."""
    value = value.to_local() if isinstance(value, DTensor) else value
    # A copy waits for the collective of a tensor, and keeps its gradient.
    return value.clone() if isinstance(value, AsyncCollectiveTensor) else value
