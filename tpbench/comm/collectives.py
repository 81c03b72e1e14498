"""torch's collectives of whole tensors under one name (renamed in torch 2.13, which warns of the old), and of rows."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_rows(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(size * rows, n): everybody's (rows, n), in rank order."""
    whole = shard.new_empty(group.size() * len(shard), shard.shape[1])
    all_gather(whole, shard.contiguous(), group=group)
    return whole


def scatter_rows(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's (rows / size, n) of the sum over ranks of everybody's (rows, n)."""
    shard = whole.new_empty(len(whole) // group.size(), whole.shape[1])
    reduce_scatter(shard, whole.contiguous(), group=group)
    return shard
