"""Problems and contexts for the tests of this workload."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.ranks import Rank
from tpbench.measure.session import Context
from tpbench.workloads.entropy_loss import EntropyLoss
from tpbench.workloads.entropy_loss.inputs import Shard, make_shard

LOSSES = ("cross_entropy", "soft_cross_entropy", "reverse_kl", "forward_kl")
DTYPES = ("float32", "float16", "bfloat16")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def context(
    here: Rank | None = None, *, tp_rank: int = 0, tp_size: int = 1, dp_rank: int = 0, dp_size: int = 1
) -> Context:
    """A rank of a real group (all of it tensor-parallel), or a lone rank that says it stands somewhere."""
    if here is not None:
        tp_rank, tp_size = here.rank, here.world_size
    group: Any = None if here is None else here.group
    where = device() if here is None else here.device
    return Context(tp_rank, tp_size * dp_size, tp_rank, tp_size, dp_rank, dp_size, group, group, where)


def problem(**fields: Any) -> EntropyLoss:
    """A small problem whose vocabulary nothing divides."""
    return EntropyLoss(**{"tokens": 13, "vocab": 101, **fields})


def alone(cell: EntropyLoss) -> Shard:
    """The whole problem on one rank."""
    return make_shard(cell, context())
