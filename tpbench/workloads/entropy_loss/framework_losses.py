"""Calls of the entropy losses of training frameworks. Only ranks that run them import this module."""

from __future__ import annotations

from typing import Any

import torch

from tpbench.workloads.entropy_loss.inputs import IGNORED, Shard
from tpbench.workloads.entropy_loss.output import Output, Step
from tpbench.workloads.entropy_loss.problem import EntropyLoss


def flash_attn(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/Dao-AILab/flash-attention: flash_attn.ops.triton.cross_entropy.cross_entropy_loss.

    Ranks gather each other's log-sum-exp and sum the logits of the labels. The gradient is a new tensor, because the
    variant leaves `inplace_backward` at its default.
    """
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    count = _counted(shard)

    def run() -> Output:
        logits = shard.logits.detach().requires_grad_()
        row_loss, _ = cross_entropy_loss(
            logits,
            shard.target,
            logit_scale=problem.logits_scale,
            ignore_index=IGNORED,
            process_group=shard.group,
        )
        loss = row_loss.sum() / count
        (grad,) = torch.autograd.grad(loss, logits)
        return Output(loss.detach(), row_loss.detach(), grad)

    gathered = 4 * shard.tokens * (shard.tp_size - 1)
    summed = 2 * 4 * shard.tokens * (shard.tp_size - 1) // shard.tp_size
    return Step(run, bytes_communicated=gathered + summed)


def transformer_engine(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/NVIDIA/TransformerEngine: transformer_engine.pytorch.parallel_cross_entropy.

    Ranks gather four fp32 numbers of each row.
    """
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    count = _counted(shard)

    def run() -> Output:
        logits = shard.logits.detach().requires_grad_()
        row_loss = parallel_cross_entropy(
            logits[None], shard.target[None], dist_process_group=shard.group, ignore_idx=IGNORED
        )[0]
        loss = row_loss.sum() / count
        (grad,) = torch.autograd.grad(loss, logits)
        return Output(loss.detach(), row_loss.detach(), grad)

    return Step(run, bytes_communicated=4 * 4 * shard.tokens * (shard.tp_size - 1))


def torchtitan(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/pytorch/torchtitan: torchtitan.components.loss.cross_entropy_loss of DTensors.

    It is written in torch operations and fp32, and returns the sum over rows. Ranks exchange three all-reduces.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import Shard as Along
    from torchtitan.components.loss import cross_entropy_loss

    assert shard.group is not None  # the variant does not support tp_size=1
    mesh = DeviceMesh.from_group(shard.group, shard.device.type, mesh_dim_names=("tp",))
    labels = DTensor.from_local(shard.target[None], mesh, [Replicate()], run_check=False)
    count = _counted(shard)

    def run() -> Output:
        logits = shard.logits.detach().requires_grad_()
        whole = DTensor.from_local(logits[None], mesh, [Along(2)], run_check=False)
        total: Any = cross_entropy_loss(whole, labels)
        loss = total.to_local() / count
        (grad,) = torch.autograd.grad(loss, logits)
        return Output(loss.detach(), None, grad)

    return Step(run, bytes_communicated=3 * 2 * 4 * shard.tokens * (shard.tp_size - 1) // shard.tp_size)


def _counted(shard: Shard) -> torch.Tensor:
    """Return the number of rows whose label counts, at least 1."""
    return (shard.target != IGNORED).sum().clamp(min=1)
