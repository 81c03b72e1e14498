"""The linear loss by torch's own functions and autograd: linear_gather, _torch, _loss_parallel and _compiled."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpbench.workloads.linear_loss.inputs import Output, Shard, Step
from tpbench.workloads.linear_loss.problem import LinearLoss
from tpbench.workloads.losses import formulas
from tpbench.workloads.losses.formulas import Losses
from tpbench.workloads.sizes import IGNORED, bytes_of_all_reduce


def gather(problem: LinearLoss, shard: Shard) -> Step:
    """Prepare an iteration: logits, all-gather, loss and its gradient, then the products of this rank's slice."""

    def run() -> Output:
        logits = formulas.gathered(shard, shard.hidden @ shard.weight.t())
        target = formulas.gathered_target(problem, shard, logits_of_teacher(shard))
        losses_of = partial(formulas.of_whole_vocabulary, problem, target=target, rows=shard.rows)
        results, grads = formulas.differentiated((logits,), losses_of, partial(objective, shard), trains=problem.trains)
        return with_products(shard, *results, *(grad[:, shard.vocab_start : shard.vocab_stop] for grad in grads))

    sent = formulas.bytes_of_gather(problem, shard, shard.hidden.itemsize)
    return Step(run, sent + bytes_of_gradient(problem, shard))


def chunked(problem: LinearLoss, shard: Shard) -> Step:
    """https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear_cross_entropy.html, in chunks."""
    options: Any = torch.nn.LinearCrossEntropyOptions()
    return step_of_mean(problem, shard, partial(F.linear_cross_entropy, ignore_index=IGNORED, options=options))


def step_of_mean(problem: LinearLoss, shard: Shard, mean_loss: Callable[..., Tensor]) -> Step:
    """Return the step of a function of hidden states, weight and labels, for one rank."""
    return Step(lambda: differentiated(problem, shard, lambda *factors: mean_loss(*factors, shard.labels).float()))


def logits_of_teacher(shard: Shard) -> Any:
    """Return the teacher's local logits, or the target if there are none."""
    return shard.target if shard.teacher is None else shard.teacher[0] @ shard.teacher[1].t()


def with_products(
    shard: Shard, loss: Tensor, row_loss: Tensor | None, entropy: Tensor | None, grad: Tensor | None = None
) -> Output:
    """Return losses and, from the gradient of the local logits, those of the hidden states and of the weight."""
    grads = () if grad is None else (shard.reduce(grad @ shard.weight), grad.t() @ shard.hidden)
    return Output(loss, row_loss, entropy, *grads)


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

    return step_of_mean(problem, shard, torch.compile(mean_loss, fullgraph=True, dynamic=False))


def differentiated(
    problem: LinearLoss, shard: Shard, losses_of: Callable[[Tensor, Tensor], Losses], *, sums: bool = False
) -> Output:
    """Return the losses of (hidden, weight) and, for training, the gradients of `objective`, summed over the ranks.

    sums: the backward pass of `losses_of` sums the hidden states' gradient itself.
    """
    factors = shard.hidden, shard.weight
    losses, grads = formulas.differentiated(factors, losses_of, partial(objective, shard), trains=problem.trains)
    return Output(*losses, *((grads[0] if sums else shard.reduce(grads[0]), grads[1]) if grads else ()))


def objective(shard: Shard, loss: Tensor, logprob: Tensor | None, entropy: Tensor | None) -> Tensor:
    """Return the mean loss, or a scalar whose gradients by the rows' numbers are the shard's upstream ones."""
    if shard.upstream is None or logprob is None:
        return loss
    of_logprob, of_entropy = shard.upstream
    total = (logprob * of_logprob).sum()
    return total if entropy is None else total + (entropy * of_entropy).sum()


def bytes_of_gradient(problem: LinearLoss, shard: Shard) -> int:
    """Return the bytes that a rank sends in an all-reduce of the hidden states' gradient. 0 without training."""
    return bytes_of_all_reduce(shard.hidden.nbytes, shard.tp_size) if problem.trains else 0
