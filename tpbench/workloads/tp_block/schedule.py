"""How a product and its collective are laid out in time: the interface, and the plain ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.collectives import gather_rows, scatter_rows

Pending: TypeAlias = Callable[[], Tensor]
"""A result that may still be on its way; called once, it is there for the current stream."""


class Schedule(Protocol):
    """The two operations of tensor and sequence parallelism over `size` ranks. Collective; called alike on all ranks.

    Shards are equal runs of rows, in the order of the group's ranks. All tensors are contiguous matrices of one dtype,
    but for `matrix`, which may be a transposed view.
    """

    @property
    def rank(self) -> int:
        """In the group, not in the world."""

    @property
    def size(self) -> int:
        """Ranks of the group."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None: there is no communication."""

    @property
    def divisor(self) -> int:
        """Of the rows of a product that is scattered."""

    def gather(self, shard: Tensor) -> Pending:
        """(size * rows, columns) from everybody's (rows, columns). Good until the next gather of any kind."""

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        """The same, and its product with this rank's matrix (columns, any). `keep`: good for as long as wanted."""

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        """This rank's (rows / size, n) of the sum over ranks of everybody's whole (rows, k) @ matrix (k, n).
        `awaited`: the caller has nothing to do meanwhile and asks for it at once."""


@dataclass(frozen=True)
class LinearPlan:
    """The schedules of one layer."""

    forward: Schedule
    backward: Schedule

    @classmethod
    def always(cls, schedule: Schedule) -> LinearPlan:
        return cls(schedule, schedule)


class LocalSchedule:
    """One process: nothing to send."""

    rank, size, group, divisor = 0, 1, None, 1

    def gather(self, shard: Tensor) -> Pending:
        return lambda: shard

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        return shard, shard @ matrix

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        product = whole @ matrix
        return lambda: product


class SequentialSchedule:
    """All-gather, product, reduce-scatter, one after the other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.divisor = self.size

    def gather(self, shard: Tensor) -> Pending:
        whole = gather_rows(shard, self.group)
        return lambda: whole

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        whole = self.gather(shard)()
        return whole, whole @ matrix

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        mine = self.scatter(whole @ matrix)
        return lambda: mine

    def scatter(self, parts: Tensor) -> Tensor:
        """This rank's (rows / size, n) of the sum over ranks of everybody's (rows, n)."""
        return scatter_rows(parts, self.group)


class NoCommunicationSchedule:
    """SequentialSchedule without its communication: what a step costs apart from it. Its results are wrong by design.

    What would be gathered is made up of this rank's first shard of each shape, so that products run on real numbers.
    """

    group = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.divisor = rank, size, size
        self.made_up: dict[torch.Size, Tensor] = {}

    def gather(self, shard: Tensor) -> Pending:
        if shard.shape not in self.made_up:
            self.made_up[shard.shape] = shard.detach().repeat(self.size, 1)
        whole = self.made_up[shard.shape]
        return lambda: whole

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        whole = self.gather(shard)()
        return whole, whole @ matrix

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        product = whole @ matrix
        mine = product.view(self.size, -1, product.shape[1])[self.rank]
        return lambda: mine
