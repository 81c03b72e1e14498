"""linear_gather, linear_loss_parallel, linear_compiled: the linear loss by torch's own functions and autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpbench.workloads.linear_loss.inputs import Output, Shard, Step
from tpbench.workloads.linear_loss.problem import LinearLoss
from tpbench.workloads.losses import formulas
from tpbench.workloads.sizes import IGNORED, bytes_of_all_reduce

Losses: TypeAlias = Tensor | tuple[Tensor, Tensor | None, Tensor | None]
"""The mean loss, or with it the losses (or log-probabilities) and entropies of rows, if they are computed."""


def gather(problem: LinearLoss, shard: Shard) -> Step:
    """Prepare an iteration: logits, all-gather, loss and its gradient, then the products of this rank's slice."""

    def run() -> Output:
        logits = formulas.gathered(shard, shard.hidden @ shard.weight.t()).requires_grad_(problem.trains)
        target = shard.target if shard.teacher is None else shard.teacher[0] @ shard.teacher[1].t()
        x = formulas.scaled(problem, logits)
        target = formulas.gathered_target(problem, shard, target)
        loss, row_loss = formulas.mean_and_rows(problem, x, target, shard.rows)
        entropy = _entropy(x, shard.labels) if problem.entropy else None
        if not problem.trains:
            return Output(loss, row_loss, entropy)
        differentiable = loss if shard.upstream is None else objective(shard, row_loss, entropy)
        (grad,) = torch.autograd.grad(differentiable, logits)
        grad = grad[:, shard.vocab_start : shard.vocab_start + shard.columns]
        return Output(
            loss.detach(),
            row_loss.detach(),
            None if entropy is None else entropy.detach(),
            _summed(grad @ shard.weight, shard),
            grad.t() @ shard.hidden,
        )

    sent = formulas.bytes_of_gather(problem, shard, shard.hidden.itemsize)
    return Step(run, sent + bytes_of_gradient(problem, shard))


def loss_parallel(problem: LinearLoss, shard: Shard) -> Step:
    """https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html: loss_parallel, of logits in fp32."""
    assert shard.labels is not None  # the variant does not support others

    def iteration(mean_loss: Callable[[Tensor], Tensor]) -> Output:
        return differentiated(problem, shard, lambda hidden, weight: mean_loss(F.linear(hidden, weight).float()))

    run = formulas.under_loss_parallel(shard, shard.labels, iteration)
    return Step(run, formulas.bytes_of_statistics(3, shard) + bytes_of_gradient(problem, shard))


def compiled(problem: LinearLoss, shard: Shard) -> Step:
    """Prepare torch.compile of the product and the loss as one graph, with autograd's backward."""

    def mean_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=IGNORED)

    function: Any = torch.compile(mean_loss, fullgraph=True, dynamic=False)
    return Step(lambda: differentiated(problem, shard, lambda *factors: function(*factors, shard.labels)))


def differentiated(
    problem: LinearLoss, shard: Shard, losses_of: Callable[[Tensor, Tensor], Losses], *, summed: bool = False
) -> Output:
    """Return the losses of (hidden, weight) and, for training, the gradients by autograd.

    These are of the mean loss, or of `objective`. The hidden states' gradient is summed over the ranks here, unless
    autograd's is already (`summed`).
    """
    factors = tuple(factor.detach().requires_grad_(problem.trains) for factor in (shard.hidden, shard.weight))
    with torch.set_grad_enabled(problem.trains):
        losses = losses_of(*factors)
    loss, row_loss, entropy = losses if isinstance(losses, tuple) else (losses, None, None)
    rows = (None if values is None else values.detach() for values in (row_loss, entropy))
    output = Output(loss.detach(), *rows)
    if not problem.trains:
        return output
    differentiable = loss if row_loss is None or shard.upstream is None else objective(shard, row_loss, entropy)
    grad_hidden, grad_weight = torch.autograd.grad(differentiable, factors)
    return replace(output, grad_hidden=grad_hidden if summed else _summed(grad_hidden, shard), grad_weight=grad_weight)


def objective(shard: Shard, logprob: Tensor, entropy: Tensor | None) -> Tensor:
    """Return a scalar whose gradients by the rows' log-probabilities and entropies are the shard's upstream ones."""
    assert shard.upstream is not None
    of_logprob, of_entropy = shard.upstream
    total = (logprob * of_logprob).sum()
    return total if entropy is None else total + (entropy * of_entropy).sum()


def _entropy(x: Tensor, labels: Tensor | None) -> Tensor:
    """Return the entropy of each row's softmax, (tokens,): 0 for a row that does not count."""
    log_p = x.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return entropy if labels is None else entropy.where(labels != IGNORED, 0.0)


def _summed(grad: Tensor, shard: Shard) -> Tensor:
    if shard.group is not None:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=shard.group)
    return grad


def bytes_of_gradient(problem: LinearLoss, shard: Shard) -> int:
    """Return the bytes that a rank sends in an all-reduce of the hidden states' gradient. 0 without training."""
    return bytes_of_all_reduce(shard.hidden.nbytes, shard.tp_size) if problem.trains else 0
