"""Calls of other projects' linear losses. Only ranks that run them import this module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tpbench.workloads.linear_loss.in_torch import differentiated
from tpbench.workloads.linear_loss.inputs import IGNORED, Shard
from tpbench.workloads.linear_loss.output import Step
from tpbench.workloads.linear_loss.problem import LinearLoss


def liger(problem: LinearLoss, shard: Shard) -> Step:
    """https://github.com/linkedin/Liger-Kernel: LigerFusedLinearCrossEntropyLoss, in chunks that it chooses."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    function = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)
    return Step(
        lambda: differentiated(problem, shard, lambda hidden, weight: function(weight, hidden, shard.labels).float())
    )


def cut_cross_entropy(problem: LinearLoss, shard: Shard) -> Step:
    """https://github.com/apple/ml-cross-entropy: linear_cross_entropy, which stores no logits."""
    from cut_cross_entropy import linear_cross_entropy

    return Step(
        lambda: differentiated(
            problem,
            shard,
            lambda hidden, weight: linear_cross_entropy(
                hidden, weight, shard.labels, ignore_index=IGNORED, impl="cce"
            ).float(),
        )
    )


def torch_linear_cross_entropy(problem: LinearLoss, shard: Shard) -> Step:
    """https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear_cross_entropy.html, in chunks."""
    function: Any = F.linear_cross_entropy
    options: Any = torch.nn.LinearCrossEntropyOptions()

    return Step(
        lambda: differentiated(
            problem,
            shard,
            lambda hidden, weight: function(
                hidden, weight, shard.labels, ignore_index=IGNORED, options=options
            ).float(),
        )
    )
