"""The variants of the linear loss: this project's, what one can write in a few lines of torch, and other projects'.

Each other project is called through its public interface. All are cross-entropies from labels; verl's kernel also gives
log-probabilities. A variant is skipped if its package is not installed.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from tpbench import packages
from tpbench.workloads.linear_loss.problem import WORKLOAD, LinearLoss


def _one_rank_with_labels(problem: LinearLoss, tp_size: int) -> str | None:
    """Return why a cross-entropy for one rank cannot do the problem."""
    return "it is for one GPU" if tp_size > 1 else _labels_only(problem)


def _labels_of_even_shards(problem: LinearLoss, tp_size: int) -> str | None:
    """Return why a cross-entropy that needs shards of one size cannot do the problem."""
    if problem.vocab % tp_size:
        return f"it needs a vocab that tp_size divides, got {problem.vocab} and {tp_size}"
    return _labels_only(problem)


def _labels_only(problem: LinearLoss) -> str | None:
    """Return why a cross-entropy from labels cannot do the problem."""
    if problem.loss != "cross_entropy":
        return f"it has no {problem.loss}, only cross_entropy"
    return "it divides by zero where every row is ignored" if problem.ignored == 1.0 else None


@WORKLOAD.variant(
    "tpbench.kernels.linear_entropy_loss: chunks of rows, our loss in place, sums over ranks behind products",
    options={"entropy", "sequence_parallel", "main_grad", "logits_gib", "exchange"},
    requires=("triton",),
    uses_triton=True,
    requires_cuda=lambda problem: problem.exchange == "symmetric",
)
def linear_tp(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import linear_tp as implementation

    return implementation.prepare(problem, shard)


@WORKLOAD.variant(
    "all logits, our loss in place, two products and one all-reduce, in ten lines",
    options={"entropy", "exchange"},
    requires=("triton",),
    uses_triton=True,
    requires_cuda=lambda problem: problem.exchange == "symmetric",
)
def linear_unfused(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import linear_tp as implementation

    return implementation.prepare_unfused(problem, shard)


@WORKLOAD.variant("all-gather the logits to the whole vocabulary, then torch's own loss in fp32", options={"entropy"})
def linear_gather(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import in_torch

    return in_torch.gather(problem, shard)


@WORKLOAD.variant(
    "F.linear, then F.cross_entropy of a sharded DTensor in fp32 under torch's loss_parallel()",
    unsupported_reason=lambda problem, tp_size: (
        "unsharded it is linear_gather" if tp_size == 1 else _labels_of_even_shards(problem, tp_size)
    ),
)
def linear_loss_parallel(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import in_torch

    return in_torch.loss_parallel(problem, shard)


@WORKLOAD.variant(
    "torch.compile of F.linear and F.cross_entropy in fp32, with autograd's backward",
    requires_cuda=True,
    unsupported_reason=_one_rank_with_labels,
)
def linear_compiled(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import in_torch

    return in_torch.compiled(problem, shard)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: (2, 13, 0) of 2.13.0+cu130."""
    return tuple(int(number) for number in version.split("+")[0].split(".")[:3] if number.isdigit())


@WORKLOAD.variant(
    "Liger's Triton kernels: LigerFusedLinearCrossEntropyLoss",
    requires=("liger_kernel",),
    requires_cuda=True,
    unsupported_reason=_one_rank_with_labels,
)
def linear_liger(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import adapters

    return adapters.liger(problem, shard)


def _liger_cutedsl(problem: LinearLoss, tp_size: int) -> str | None:
    if reason := _one_rank_with_labels(problem, tp_size):
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
    return _labels_only(problem)


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
    return None if problem.loss == "logprob" else _labels_only(problem)


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


def quack_chunk_rows(problem: LinearLoss) -> int | None:
    """Return QuACK's default chunk size, or one near it with which its kernels compile. None if there is none.

    QuACK 0.6.5 raises an error if a chunk has as many rows as the hidden states have columns. It pads the rows of the
    last chunk to a multiple of 128.
    """
    for size in (4096, 8192, 2048, 1024, 512, 256, 128):
        chunks = -(-problem.tokens // size)
        last = problem.tokens - (chunks - 1) * size
        padded = -(-last // 128) * 128
        if problem.hidden != padded and (chunks == 1 or problem.hidden != size):
            return size
    return None


def _quack(problem: LinearLoss, tp_size: int) -> str | None:
    if reason := _one_rank_with_labels(problem, tp_size):
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
    return _labels_of_even_shards(problem, tp_size) if problem.dtype == "bfloat16" else "it has only bfloat16"


@WORKLOAD.variant(
    "Liger's native tensor-parallel kernel: CUTLASS and NVSHMEM, without multicast",
    requires=("liger_kernel", "liger_cute_kernels"),
    process_settings="environment variables of NVSHMEM",
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
    return _one_rank_with_labels(problem, tp_size)


@WORKLOAD.variant("torch's own linear_cross_entropy in chunks (torch 2.13)", unsupported_reason=_torch)
def linear_torch(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import adapters

    return adapters.torch_linear_cross_entropy(problem, shard)
