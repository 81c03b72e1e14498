"""Linear losses of other projects, each called through its public interface.

All are cross-entropies from labels; verl's kernel also gives log-probabilities. A variant is skipped if its package is
not installed.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from tpbench import packages
from tpbench.workloads.linear_loss.problem import WORKLOAD, LinearLoss
from tpbench.workloads.linear_loss.quack_chunks import quack_chunk_rows
from tpbench.workloads.linear_loss.variants import labels_of_even_shards, labels_only, one_rank_with_labels


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: (2, 13, 0) of 2.13.0+cu130."""
    return tuple(int(number) for number in version.split("+")[0].split(".")[:3] if number.isdigit())


@WORKLOAD.variant(
    "Liger's Triton kernels: LigerFusedLinearCrossEntropyLoss",
    requires=("liger_kernel",),
    requires_cuda=True,
    unsupported_reason=one_rank_with_labels,
)
def linear_liger(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import adapters

    return adapters.liger(problem, shard)


def _liger_cutedsl(problem: LinearLoss, tp_size: int) -> str | None:
    if reason := one_rank_with_labels(problem, tp_size):
        return reason
    if not problem.trains:
        return "it computes a gradient in its forward pass"
    if problem.dtype != "bfloat16" or problem.tokens % 128 or problem.vocab % 256:
        return "it needs bfloat16, tokens that 128 divides and a vocab that 256 divides"
    return None


@WORKLOAD.variant(
    "Liger's CuTe kernels for Hopper: liger_fused_linear_cross_entropy_sm90, with all logits",
    requires=("liger_kernel", "cutlass"),
    requires_cuda=True,
    unsupported_reason=_liger_cutedsl,
)
def linear_liger_cutedsl(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import adapters

    return adapters.liger_cutedsl(problem, shard)


_FIRST_CCE_FOR_SHARDS = (25, 4, 3)


def _cce(problem: LinearLoss, tp_size: int) -> str | None:
    if tp_size > 1 and packages.installed("cut_cross_entropy"):
        version = importlib.metadata.version("cut_cross_entropy")
        if _numbers(version) < _FIRST_CCE_FOR_SHARDS:
            return f"cut-cross-entropy {version} is for one GPU; 25.4.3, of its repository, can shard the vocabulary"
    return labels_only(problem)


@WORKLOAD.variant(
    "Apple's cut-cross-entropy in Triton, with its default filter of small gradients",
    requires=("cut_cross_entropy",),
    requires_cuda=True,
    unsupported_reason=_cce,
)
def linear_cce(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import adapters

    return adapters.cut_cross_entropy(problem, shard)


def _verl(problem: LinearLoss, tp_size: int) -> str | None:
    if problem.hidden % 128:
        return f"it needs hidden to divide by 128, got {problem.hidden}"
    return None if problem.loss == "logprob" else labels_only(problem)


@WORKLOAD.variant(
    "verl's Triton kernel: log-probabilities and entropies, logits in pieces of 1024 columns",
    options={"entropy"},
    requires=("verl",),
    requires_cuda=True,
    unsupported_reason=_verl,
)
def linear_verl(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import adapters

    return adapters.verl(problem, shard)


def _quack(problem: LinearLoss, tp_size: int) -> str | None:
    if reason := one_rank_with_labels(problem, tp_size):
        return reason
    if problem.dtype == "float32" or problem.tokens % 8 or problem.hidden % 8 or problem.vocab % 8:
        return "it needs bfloat16 or float16, and tokens, hidden and vocab that 8 divides"
    return (
        None if quack_chunk_rows(problem) else f"it needs chunks with more or fewer rows than hidden={problem.hidden}"
    )


@WORKLOAD.variant(
    "QuACK's chunked_linear_cross_entropy: CuTe kernels, chunks of rows, the weight's gradient in fp32",
    requires=("quack",),
    requires_cuda=True,
    unsupported_reason=_quack,
)
def linear_quack(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import adapters

    return adapters.quack(problem, shard)


def _liger_native(problem: LinearLoss, tp_size: int) -> str | None:
    if tp_size == 1:
        return "it needs a group of ranks"
    return labels_of_even_shards(problem, tp_size) if problem.dtype == "bfloat16" else "it has only bfloat16"


@WORKLOAD.variant(
    "Liger's native tensor-parallel kernel: CUTLASS and NVSHMEM, without multicast",
    requires=("liger_kernel", "liger_cute_kernels"),
    requires_cuda=True,
    unsupported_reason=_liger_native,
)
def linear_liger_native(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import adapters

    return adapters.liger_native(problem, shard)


def _torch(problem: LinearLoss, tp_size: int) -> str | None:
    version = importlib.metadata.version("torch")
    if _numbers(version) < (2, 13):
        return f"it needs torch 2.13, not {version}"
    return one_rank_with_labels(problem, tp_size)


@WORKLOAD.variant("torch's own linear_cross_entropy in chunks (torch 2.13)", unsupported_reason=_torch)
def linear_torch(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import adapters

    return adapters.torch_linear_cross_entropy(problem, shard)
