"""Calls of other projects' entropy losses. Only ranks that run them import this module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpbench.workloads.entropy_loss.inputs import IGNORED, Shard
from tpbench.workloads.entropy_loss.output import Output, Step
from tpbench.workloads.entropy_loss.problem import EntropyLoss


def torch_loss_parallel(problem: EntropyLoss, shard: Shard) -> Step:
    """https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html: loss_parallel.

    It computes in the dtype of its input. With compute_dtype=float32 it gets the logits in fp32.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import Shard as Along
    from torch.distributed.tensor.parallel import loss_parallel

    assert shard.group is not None  # the variant does not support tp_size=1
    mesh = DeviceMesh.from_group(shard.group, shard.device.type)
    dtype = torch.float32 if problem.compute_dtype == "float32" else shard.logits.dtype
    target = DTensor.from_local(shard.target, mesh, [Replicate()])

    def run() -> Output:
        logits = shard.logits.detach().requires_grad_()
        whole = DTensor.from_local(logits.to(dtype), mesh, [Along(1)], run_check=False)
        with loss_parallel():
            loss = F.cross_entropy(whole, target, ignore_index=IGNORED)
            (grad,) = torch.autograd.grad(loss, logits)
        local: Any = loss.detach()
        return Output(local.to_local().float(), None, grad)

    return Step(run, bytes_communicated=_three_all_reduces(shard))


def liger(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/linkedin/Liger-Kernel: LigerCrossEntropyLoss, sharded LigerVocabParallelCrossEntropy.

    LigerCrossEntropyLoss keeps losses in the dtype of its input. With compute_dtype=float32 it gets the logits in fp32.
    """
    return _liger_sharded(shard) if shard.tp_size > 1 else _liger_whole(problem, shard)


def _liger_whole(problem: EntropyLoss, shard: Shard) -> Step:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    function = LigerCrossEntropyLoss(ignore_index=IGNORED)
    dtype = torch.float32 if problem.compute_dtype == "float32" else shard.logits.dtype
    work = shard.logits.clone()  # the gradient overwrites it; a training step would make new logits

    def run() -> Output:
        logits = work.detach().requires_grad_()
        loss = function(logits.to(dtype), shard.target)
        (grad,) = torch.autograd.grad(loss, logits)
        return Output(loss.detach().float(), None, grad)

    return Step(run, restore=lambda: _copy(work, shard.logits))


def _liger_sharded(shard: Shard) -> Step:
    from liger_kernel.transformers import LigerVocabParallelCrossEntropy

    function = LigerVocabParallelCrossEntropy(ignore_index=IGNORED)
    count = (shard.target != IGNORED).sum().clamp(min=1)

    def run() -> Output:
        logits = shard.logits.detach().requires_grad_()
        row_loss = function(logits[:, None], shard.target[:, None], shard.group)[:, 0]
        loss = row_loss.sum() / count
        (grad,) = torch.autograd.grad(loss, logits)
        return Output(loss.detach(), row_loss.detach(), grad)

    return Step(run, bytes_communicated=_three_all_reduces(shard))


def megatron(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/NVIDIA/Megatron-LM: megatron.core.tensor_parallel.vocab_parallel_cross_entropy.

    It has no label to ignore. Losses of ignored rows are left out of the mean, as by Megatron's loss mask.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    counts = shard.target != IGNORED
    count = counts.sum().clamp(min=1)
    # Megatron subtracts the maximum in place from logits.float(), which is a copy unless the logits are fp32.
    overwritten = shard.logits.dtype == torch.float32
    work = shard.logits.clone() if overwritten else shard.logits

    def run() -> Output:
        logits = work.detach().requires_grad_()
        each = vocab_parallel_cross_entropy(logits[:, None], shard.target[:, None], tp_group=shard.group)[:, 0]
        row_loss = torch.where(counts, each, 0.0)
        loss = row_loss.sum() / count
        (grad,) = torch.autograd.grad(loss, logits)
        return Output(loss.detach(), row_loss.detach(), grad)

    restore = (lambda: _copy(work, shard.logits)) if overwritten else None
    return Step(run, bytes_communicated=_three_all_reduces(shard), restore=restore)


def quack(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/Dao-AILab/quack: cross_entropy_fwd, which computes loss and gradient in one launch.

    The gradient is that of the sum over rows. The factor of the mean is not applied: a training step can pass it on.
    """
    from quack.cross_entropy import cross_entropy_fwd

    count = (shard.target != IGNORED).sum().clamp(min=1)
    factor = 1.0 / count

    def run() -> Output:
        row_loss, grad = cross_entropy_fwd(shard.logits, shard.target, ignore_index=IGNORED, return_dx=True)
        return Output(row_loss.sum() * factor, row_loss, grad, factor)

    return Step(run)


def _three_all_reduces(shard: Shard) -> int:
    """Return the bytes of three fp32 all-reduces (maximum, sum, label's logit), each once around a ring and back."""
    return 3 * 2 * (shard.tp_size - 1) * shard.tokens * 4 // shard.tp_size


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
