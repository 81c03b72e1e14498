"""Linear losses of other projects, each called through its public interface.

All are cross-entropies from labels, on one rank. A variant is skipped if its package is not installed.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from tpbench.workloads.linear_loss.problem import WORKLOAD, LinearLoss
from tpbench.workloads.linear_loss.variants import one_rank_with_labels


@WORKLOAD.variant(
    "Liger's Triton kernels: LigerFusedLinearCrossEntropyLoss",
    requires=("liger_kernel",),
    requires_cuda=True,
    unsupported_reason=one_rank_with_labels,
)
def linear_liger(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import adapters

    return adapters.liger(problem, shard)


@WORKLOAD.variant(
    "Apple's cut-cross-entropy in Triton, with its default filter of small gradients",
    requires=("cut_cross_entropy",),
    requires_cuda=True,
    unsupported_reason=one_rank_with_labels,
)
def linear_cce(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import adapters

    return adapters.cut_cross_entropy(problem, shard)


def _of_torch(problem: LinearLoss, tp_size: int) -> str | None:
    version = importlib.metadata.version("torch")
    major, minor = (int(number) for number in version.split(".")[:2])
    return (
        one_rank_with_labels(problem, tp_size) if (major, minor) >= (2, 13) else f"it needs torch 2.13, not {version}"
    )


@WORKLOAD.variant("torch's own linear_cross_entropy in chunks (torch 2.13)", unsupported_reason=_of_torch)
def linear_torch(problem: LinearLoss, shard: Any) -> Any:
    from tpbench.workloads.linear_loss import adapters

    return adapters.torch_linear_cross_entropy(problem, shard)
