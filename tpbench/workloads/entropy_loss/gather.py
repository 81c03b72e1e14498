"""pytorch_gather: the whole vocabulary on every rank, and torch's own losses and autograd."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpbench.comm.collectives import gather_rows
from tpbench.workloads.entropy_loss.inputs import Shard
from tpbench.workloads.entropy_loss.output import Output, Step
from tpbench.workloads.entropy_loss.problem import EntropyLoss
from tpbench.workloads.two_logit_losses import TWO_LOGIT_LOSSES
from tpbench.workloads.vocabulary import IGNORED, shard_bounds


def prepare(problem: EntropyLoss, shard: Shard) -> Step:
    """Prepare an iteration: gather, loss, backward, and this rank's slice of the gradient.

    With compile=true the loss goes through torch.compile as one graph, and autograd's backward with it.
    """
    losses: Any = functools.partial(_losses, problem)
    if problem.compile:
        losses = torch.compile(losses, fullgraph=True, dynamic=False)

    def run() -> Output:
        logits = _whole(shard.logits, shard).requires_grad_()
        target = shard.target if problem.from_labels else _whole(shard.target, shard)
        loss, row_loss = losses(logits, target)
        (grad,) = torch.autograd.grad(loss, logits)
        grad = grad[:, shard.vocab_start : shard.vocab_stop].contiguous()
        return Output(loss.detach(), row_loss.detach().float(), grad)

    gathered = 1 if problem.from_labels else 2
    widest = -(-shard.vocab_size // shard.tp_size)
    sent = (shard.tp_size - 1) * shard.tokens * widest * shard.logits.element_size() * gathered
    return Step(run, bytes_communicated=sent)


def _losses(problem: EntropyLoss, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss over the rows that count, and each row's loss."""
    row_loss = _row_loss(problem, logits, target)
    count = (target != IGNORED).sum().clamp(min=1) if problem.from_labels else len(logits)
    # reduction="mean" would be 0 / 0 if every row is ignored.
    return row_loss.sum(dtype=torch.float32) / count, row_loss


def _row_loss(problem: EntropyLoss, logits: Tensor, target: Tensor) -> Tensor:
    dtype = torch.float32 if problem.compute_dtype == "float32" else logits.dtype
    x = _scaled(logits.to(dtype), problem.logits_scale)
    if problem.from_labels:
        return F.cross_entropy(x, target, ignore_index=IGNORED, reduction="none")
    t = _scaled(target.to(dtype), problem.logits_scale / problem.temperature)
    return TWO_LOGIT_LOSSES[problem.loss].whole(x, t)


def _scaled(values: Tensor, factor: float) -> Tensor:
    """Return values * factor, without a pass over memory if the factor is 1."""
    return values if factor == 1.0 else values * factor


def _whole(local: Tensor, shard: Shard) -> Tensor:
    """Return (tokens, vocab) from all ranks' columns. Backends gather equal sizes: a shorter shard is padded."""
    if shard.group is None:
        return local.detach()
    bounds = [shard_bounds(shard.vocab_size, shard.tp_size, rank) for rank in range(shard.tp_size)]
    widest = max(stop - start for start, stop in bounds)
    if local.shape[1] < widest:
        local = F.pad(local, (0, widest - local.shape[1]))
    parts = gather_rows(local, shard.group).view(shard.tp_size, shard.tokens, widest)
    return torch.cat([part[:, : stop - start] for part, (start, stop) in zip(parts, bounds, strict=True)], dim=1)
