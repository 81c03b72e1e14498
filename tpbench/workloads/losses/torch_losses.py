"""Losses of logits by torch's own functions: of the gathered vocabulary, and of a sharded one under loss_parallel.

An entropy loss gets the logits, and a linear loss makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tpbench.comm.collectives import gather_rows
from tpbench.kernels import TopK
from tpbench.workloads.losses import LossProblem
from tpbench.workloads.losses.formulas import row_losses, rows_that_count
from tpbench.workloads.sizes import IGNORED, shard_bounds

OutputT = TypeVar("OutputT", bound=Any)
"""The output of either loss."""


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
    """Return labels, values and indices of a top k, or the target logits of the whole vocabulary, as
    `mean_and_rows` takes them."""
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
    return product(logits.float() if problem.compute_dtype == "float32" else logits, problem.scale)


def mean_and_rows(problem: LossProblem, x: Tensor, target: Any, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean loss over the rows that count, and each row's loss, or log-probabilities for logprob.

    x: the scaled logits of the whole vocabulary. rows: the tensors of a policy loss.
    """
    t = target
    if problem.top_k:
        t = product(target[0], problem.target_scale), target[1]
    elif not problem.from_labels:
        t = product(target.to(x.dtype), problem.target_scale)
    row_loss = row_losses(problem, x, t, rows)
    count = rows_that_count(target) if problem.from_labels else len(x)
    # reduction="mean" would be 0 / 0 if every row is ignored.
    return row_loss.sum(dtype=torch.float32) / count, row_loss


def under_loss_parallel(
    shard: Any, labels: Tensor, iteration: Callable[[Callable[[Tensor], Tensor]], OutputT]
) -> Callable[[], OutputT]:
    """Return the iteration of a loss by https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html.

    iteration: gets the function that returns the mean cross-entropy of a rank's logits, whose dtype it computes in.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    assert shard.group is not None  # the variants do not support tp_size=1
    mesh = DeviceMesh.from_group(shard.group, shard.device.type)
    target = DTensor.from_local(labels, mesh, [Replicate()])

    def mean_loss(logits: Tensor) -> Tensor:
        whole = DTensor.from_local(logits, mesh, [Shard(1)], run_check=False)
        return F.cross_entropy(whole, target, ignore_index=IGNORED)

    def run() -> OutputT:
        with loss_parallel():
            output = iteration(mean_loss)
        return replace(output, loss=output.loss.to_local().float())  # type: ignore[no-any-return]

    return run
