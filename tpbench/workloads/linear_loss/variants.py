"""This project's implementation of the linear loss, and what one can write in a few lines of torch."""

from __future__ import annotations

from typing import Any

from tpbench.workloads.linear_loss.problem import WORKLOAD, LinearLoss


def one_rank_with_labels(problem: LinearLoss, tp_size: int) -> str | None:
    """Return why a cross-entropy for one rank cannot do the problem."""
    return "it is for one GPU" if tp_size > 1 else labels_only(problem)


def labels_of_even_shards(problem: LinearLoss, tp_size: int) -> str | None:
    """Return why a cross-entropy that needs shards of one size cannot do the problem."""
    if problem.vocab % tp_size:
        return f"it needs a vocab that tp_size divides, got {problem.vocab} and {tp_size}"
    return labels_only(problem)


def labels_only(problem: LinearLoss) -> str | None:
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
        "unsharded it is linear_gather" if tp_size == 1 else labels_of_even_shards(problem, tp_size)
    ),
)
def linear_loss_parallel(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import in_torch

    return in_torch.loss_parallel(problem, shard)


@WORKLOAD.variant(
    "torch.compile of F.linear and F.cross_entropy in fp32, with autograd's backward",
    requires_cuda=True,
    unsupported_reason=one_rank_with_labels,
)
def linear_compiled(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import in_torch

    return in_torch.compiled(problem, shard)
