"""linear_gather, linear_loss_parallel, linear_compiled: the linear loss by torch's own functions and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpbench.workloads.linear_loss.inputs import Output, Shard, Step
from tpbench.workloads.linear_loss.problem import LinearLoss
from tpbench.workloads.losses.formulas import bytes_of_statistics, row_losses, rows_that_count, whole
from tpbench.workloads.sizes import IGNORED, bytes_of_all_reduce


def gather(problem: LinearLoss, shard: Shard) -> Step:
    """Prepare an iteration: logits, all-gather, loss and its gradient, then the products of this rank's slice."""
    counts = None if shard.labels is None else shard.labels != IGNORED
    number = problem.tokens if shard.labels is None else rows_that_count(shard.labels)

    def gathered(logits: Tensor) -> Tensor:
        return whole(logits, problem.vocab, shard.tp_size, shard.group)

    def run() -> Output:
        logits = gathered(shard.hidden @ shard.weight.t()).requires_grad_(problem.trains)
        target = shard.target
        if shard.teacher is not None:
            target = gathered(shard.teacher[0] @ shard.teacher[1].t()).float() / problem.temperature
        elif shard.top is not None:
            target = shard.top.values / problem.temperature, shard.top.indices
        x = logits.float() / (problem.temperature if problem.from_labels else 1.0)
        row_loss = row_losses(problem, x, target, shard.rows)
        entropy = _entropy(x, counts) if problem.entropy else None
        loss = row_loss.sum() / number
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

    matrices, widest = (1 if shard.teacher is None else 2), -(-problem.vocab // shard.tp_size)
    sent = matrices * (shard.tp_size - 1) * problem.tokens * widest * shard.hidden.itemsize
    return Step(run, sent + bytes_of_gradient(problem, shard))


def loss_parallel(problem: LinearLoss, shard: Shard) -> Step:
    """https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html: loss_parallel, of logits in fp32."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import Shard as Along
    from torch.distributed.tensor.parallel import loss_parallel as parallel

    assert shard.group is not None and shard.labels is not None  # the variant does not support others
    mesh = DeviceMesh.from_group(shard.group, shard.device.type)
    target = DTensor.from_local(shard.labels, mesh, [Replicate()])

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).float()
        whole = DTensor.from_local(logits, mesh, [Along(1)], run_check=False)
        return F.cross_entropy(whole, target, ignore_index=IGNORED)

    def run() -> Output:
        with parallel():
            output = differentiated(problem, shard, loss_of)
        loss: Any = output.loss
        return Output(loss.to_local().float(), None, None, output.grad_hidden, output.grad_weight)

    return Step(run, bytes_of_statistics(3, shard.tokens, shard.tp_size) + bytes_of_gradient(problem, shard))


def compiled(problem: LinearLoss, shard: Shard) -> Step:
    """Prepare torch.compile of the product and the loss as one graph, with autograd's backward."""

    def mean_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=IGNORED)

    function: Any = torch.compile(mean_loss, fullgraph=True, dynamic=False)
    return Step(lambda: differentiated(problem, shard, lambda *factors: function(*factors, shard.labels)))


def differentiated(
    problem: LinearLoss, shard: Shard, loss_of: Callable[[Tensor, Tensor], Tensor], *, summed: bool = False
) -> Output:
    """Return the mean loss of (hidden, weight) and, for training, its gradients by autograd.

    The hidden states' gradient is summed over the ranks here, unless autograd's is already (`summed`).
    """
    if not problem.trains:
        with torch.no_grad():
            return Output(loss_of(shard.hidden, shard.weight).detach())
    hidden, weight = (factor.detach().requires_grad_() for factor in (shard.hidden, shard.weight))
    loss = loss_of(hidden, weight)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    return Output(loss.detach(), None, None, grad_hidden if summed else _summed(grad_hidden, shard), grad_weight)


def differentiated_rows(
    problem: LinearLoss, shard: Shard, rows_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Output:
    """Return log-probabilities and entropies of (hidden, weight) and, for training, the gradients of `objective`.

    rows_of: return both, (tokens,) each. They may be anything for a row that does not count.
    """
    assert shard.labels is not None
    counts = shard.labels != IGNORED
    number = counts.sum().clamp(min=1)

    def rows_that_count(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        logprob, entropy = rows_of(hidden, weight)
        return logprob.where(counts, 0.0), entropy.where(counts, 0.0) if problem.entropy else None

    if not problem.trains:
        with torch.no_grad():
            logprob, entropy = rows_that_count(shard.hidden, shard.weight)
        return Output(logprob.sum() / number, logprob, entropy)
    hidden, weight = (factor.detach().requires_grad_() for factor in (shard.hidden, shard.weight))
    logprob, entropy = rows_that_count(hidden, weight)
    grad_hidden, grad_weight = torch.autograd.grad(objective(shard, logprob, entropy), (hidden, weight))
    logprob, entropy = logprob.detach(), None if entropy is None else entropy.detach()
    return Output(logprob.sum() / number, logprob, entropy, _summed(grad_hidden, shard), grad_weight)


def objective(shard: Shard, logprob: Tensor, entropy: Tensor | None) -> Tensor:
    """Return a scalar whose gradients by the rows' log-probabilities and entropies are the shard's upstream ones."""
    assert shard.upstream is not None
    of_logprob, of_entropy = shard.upstream
    total = (logprob * of_logprob).sum()
    return total if entropy is None else total + (entropy * of_entropy).sum()


def _entropy(x: Tensor, counts: Tensor | None) -> Tensor:
    """Return the entropy of each row's softmax, (tokens,): 0 for a row that does not count."""
    log_p = x.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return entropy if counts is None else entropy.where(counts, 0.0)


def _summed(grad: Tensor, shard: Shard) -> Tensor:
    if shard.group is not None:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=shard.group)
    return grad


def bytes_of_gradient(problem: LinearLoss, shard: Shard) -> int:
    """Return the bytes that a rank sends in an all-reduce of the hidden states' gradient. 0 without training."""
    return bytes_of_all_reduce(shard.hidden.nbytes, shard.tp_size) if problem.trains else 0
