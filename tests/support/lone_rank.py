"""Collectives without processes: one process stands for all ranks, of which rank r has 1 + r times its numbers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import Rank
from tpbench.measure import timers


def lone_rank(monkeypatch: pytest.MonkeyPatch, world_size: int = 2, log: list[str] | None = None) -> Rank:
    """Replace torch's collectives, and return rank 0, whose cold cache is small.

    `log` receives the name of each collective.
    """
    calls = [] if log is None else log

    def all_gather(by_rank: list[Tensor], numbers: Tensor, *_: Any, **__: Any) -> None:
        calls.append("all_gather")
        assert len(by_rank) == world_size
        for rank, each in enumerate(by_rank):
            each.copy_(numbers * (1 + rank))

    def all_reduce(numbers: Tensor, op: Any = dist.ReduceOp.SUM, *_: Any, **__: Any) -> None:
        calls.append("all_reduce")
        every = torch.stack([numbers * (1 + rank) for rank in range(world_size)])
        reduced = {dist.ReduceOp.SUM: every.sum(0), dist.ReduceOp.MAX: every.amax(0), dist.ReduceOp.MIN: every.amin(0)}
        numbers.copy_(reduced[op])

    monkeypatch.setattr(timers, "CPU_FLUSH_BYTES", 2)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: calls.append("broadcast"))
    monkeypatch.setattr(dist, "barrier", lambda *_, **__: calls.append("barrier"))
    nobody: Any = None
    return Rank(0, world_size, nobody, torch.device("cpu"))
