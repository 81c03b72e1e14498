"""The losses of gathered logits, or of sharded ones under loss_parallel, by torch's own functions and autograd."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tpbench.comm.collectives import gather_rows
from tpbench.kernels import TopK
from tpbench.kernels.objective import Objective
from tpbench.workloads.losses import LossProblem
from tpbench.workloads.losses.inputs import CLIP, objective_inputs, sequence_lengths
from tpbench.workloads.sizes import IGNORED, bytes_of_all_reduce, shard_bounds


def _kl_div(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return KL(b || a) of each row."""
    return F.kl_div(log_a, log_b, log_target=True, reduction="none").sum(-1)


def entropies(x: Tensor) -> Tensor:
    """Return the entropy of each row of scaled logits."""
    log_p = x.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


JSD_BETA = 0.5
"""The weight of the target distribution in the mixture of jsd."""


def gathered(shard: Any, local: Tensor) -> Tensor:
    """Return (tokens, vocab) from all ranks' columns. Backends gather equal sizes: a shorter shard is padded."""
    if shard.group is None:
        return local.detach()
    bounds = [shard_bounds(shard.vocab_size, shard.tp_size, rank) for rank in range(shard.tp_size)]
    widest = max(stop - start for start, stop in bounds)
    if local.shape[1] < widest:
        local = F.pad(local, (0, widest - local.shape[1]))
    parts = gather_rows(local, shard.group).view(shard.tp_size, len(local), widest)
    return torch.cat([part[:, : stop - start] for part, (start, stop) in zip(parts, bounds, strict=True)], dim=1)


def gathered_target(problem: LossProblem, shard: Any, target: Any) -> Any:
    """Return labels, values and indices of a top k, or the target logits of the whole vocabulary."""
    if isinstance(target, TopK):
        return target.values, target.indices
    return target if problem.from_labels else gathered(shard, target)


def bytes_of_gather(problem: LossProblem, shard: Any, item: int) -> int:
    """Return the bytes that a rank sends to gather logits, and target logits if there are any, of `item` bytes each."""
    widest = -(-problem.vocab // shard.tp_size)
    return int(problem.matrices * (shard.tp_size - 1) * problem.tokens * widest * item)


def product(values: Tensor, factor: float) -> Tensor:
    """Return values * factor, without a pass over memory if the factor is 1."""
    return values if factor == 1.0 else values * factor


def scaled(problem: LossProblem, logits: Tensor) -> Tensor:
    """Return the scaled logits in the dtype in which torch uses them."""
    x = logits.float() if problem.compute_dtype == "float32" else logits
    if problem.softcap:
        x = problem.softcap * (x / problem.softcap).tanh()
    return product(x, problem.scale)


def of_whole_vocabulary(
    problem: LossProblem, logits: Tensor, target: Any, rows: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the mean loss over the rows that count, each row's loss, or log-probabilities for logprob, and entropies.

    target: that of `gathered_target`. rows: the tensors of a policy loss.
    """
    x, entropy = scaled(problem, logits), None
    row_loss = _row_losses(problem, x, target, rows)
    if problem.entropy:
        entropy = entropies(x).where(target != IGNORED, 0.0) if problem.from_labels else entropies(x)
    count = rows_that_count(target) if problem.from_labels else len(x)
    # reduction="mean" would be 0 / 0 if every row is ignored.
    return row_loss.sum(dtype=torch.float32) / count, row_loss, entropy


def _row_losses(problem: LossProblem, x: Tensor, target: Any, rows: Mapping[str, Tensor]) -> Tensor:
    if not problem.from_labels:
        values, indices = target if problem.top_k else (target.to(x.dtype), None)
        t = product(values, problem.target_scale)
        if problem.loss == "soft_cross_entropy" and indices is None:
            return F.cross_entropy(x, t.softmax(-1), reduction="none")
        log_p, log_q = x.log_softmax(-1), t.log_softmax(-1)
        if indices is not None:
            log_p = log_p.gather(1, indices)
        if problem.loss == "soft_cross_entropy":
            return -(log_q.exp() * log_p).sum(-1)
        if problem.loss == "forward_kl":
            return _kl_div(log_p, log_q)
        if problem.loss == "reverse_kl":
            return _kl_div(log_q, log_p if indices is None else log_p.log_softmax(-1))
        if problem.loss == "total_variation":
            return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
        mixture = torch.logaddexp(log_p + math.log(1 - JSD_BETA), log_q + math.log(JSD_BETA))
        return JSD_BETA * _kl_div(mixture, log_q) + (1 - JSD_BETA) * _kl_div(mixture, log_p)
    smoothing = problem.label_smoothing or 0.0
    logprob: Tensor = -F.cross_entropy(x, target, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
    if problem.z_loss:
        logprob = logprob - problem.z_loss * x.logsumexp(-1).square().where(target != IGNORED, 0.0)
    if problem.objective:
        losses, _ = objective_losses(problem, logprob, entropies(x), rows)
        return torch.where(target != IGNORED, losses, 0.0)
    if problem.loss == "policy":
        losses, _ = policy_losses(problem, logprob, rows)
        if problem.entropy_weight:
            losses = losses - problem.entropy_weight * entropies(x)
        return torch.where(target != IGNORED, losses, 0.0)
    return logprob if problem.loss == "logprob" else -logprob


def objective_losses(
    problem: Any, logprobs: Tensor, entropy: Tensor, rows: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what a user's own loss returns for all rows, in the dtype of the log-probabilities."""
    objective = Objective.of(problem.objective)
    lengths = torch.tensor(sequence_lengths(problem), device=logprobs.device)
    sequences = torch.arange(len(lengths), device=logprobs.device).repeat_interleave(lengths)
    computed = {"logprobs": logprobs, "entropy": entropy, "sequences": sequences}
    given = {name: values.to(logprobs.dtype) for name, values in objective_inputs(objective, rows).items()}
    with objective.named_errors():
        result = objective.function(**{name: computed[name] for name in objective.computed}, **given)
    return result if isinstance(result, tuple) else (result, {})


def policy_losses(problem: Any, logprob: Tensor, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the clipped losses of rows (PPO, GRPO) by their labels' log-probabilities, and minus the derivatives."""
    ratio, advantages = (logprob - rows["old_logprobs"]).exp(), rows["advantages"]
    gain, bound = ratio * advantages, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * advantages
    loss, slope = -torch.minimum(gain, bound), torch.where(bound < gain, 0.0, gain)
    if problem.kl_weight:
        difference = rows["ref_logprobs"] - logprob
        loss = loss + problem.kl_weight * (difference.exp() - difference - 1)
        slope = slope + problem.kl_weight * (difference.exp() - 1)
    return loss, slope


def rows_that_count(labels: Tensor) -> Tensor:
    """Return the number of rows whose label is not ignored, at least 1, as a tensor on the labels' device."""
    return (labels != IGNORED).sum().clamp(min=1)


def bytes_of_statistics(numbers: int, shard: Any) -> int:
    """Return the bytes that a rank sends in all-reduces of fp32 numbers of each row, such as maximum and sum."""
    return bytes_of_all_reduce(numbers * 4 * shard.tokens, shard.tp_size)


Losses: TypeAlias = Tensor | tuple[Tensor | None, ...]
"""The mean loss, or with it the losses of rows and their entropies, if they are computed."""


def differentiated(
    factors: Iterable[Tensor],
    losses_of: Callable[..., Losses],
    objective: Callable[..., Tensor] = lambda loss, row_loss, entropy: loss,
    *,
    trains: bool = True,
) -> tuple[list[Any], tuple[Tensor, ...]]:
    """Return mean loss, losses of rows and entropies, or None, of the factors, and the gradients of their objective."""
    leaves = [factor.detach().requires_grad_(trains) for factor in factors]
    with torch.set_grad_enabled(trains):
        losses = losses_of(*leaves)
        results = (*(losses if isinstance(losses, tuple) else (losses,)), None, None)[:3]
        grads = torch.autograd.grad(objective(*results), leaves) if trains else ()
    return [None if values is None else values.detach() for values in results], grads


def under_loss_parallel(
    shard: Any, labels: Tensor, iteration: Callable[[Callable[[Tensor], Tensor]], Any]
) -> Callable[[], Any]:
    """Return an iteration that gets the mean cross-entropy of a rank's logits by torch's `loss_parallel`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    assert shard.group is not None  # the variants do not support tp_size=1
    mesh = DeviceMesh.from_group(shard.group, shard.device.type)
    target = DTensor.from_local(labels, mesh, [Replicate()])

    def mean_loss(logits: Tensor) -> Tensor:
        whole = DTensor.from_local(logits, mesh, [Shard(1)], run_check=False)
        return F.cross_entropy(whole, target, ignore_index=IGNORED)

    def run() -> Any:
        with loss_parallel():
            output = iteration(mean_loss)
        return replace(output, loss=output.loss.to_local().float())

    return run
