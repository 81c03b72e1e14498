"""Schedules: how a product and its collective are laid out in time. The interface, and the plain schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.collectives import gather_rows, scatter_rows

Pending: TypeAlias = Callable[[], Tensor]
"""A result that may not be complete yet. Call it once: it returns the result, ready for the current stream."""


class Schedule(Protocol):
    """The all-gather and reduce-scatter of tensor parallelism with their products, over `size` ranks.

    All methods are collective. Shards are equal runs of rows, in the order of the group's ranks. All tensors are
    contiguous matrices of one dtype, except `matrix`, which may be a transposed view.
    """

    @property
    def rank(self) -> int:
        """The rank in the group, not in the world."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, or None if the schedule does not communicate."""

    @property
    def divisor(self) -> int:
        """The number that must divide the rows of a product that is scattered."""

    def gather(self, shard: Tensor) -> Pending:
        """All-gather (rows, columns) shards to (size * rows, columns). Valid until the next gather of any kind."""

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        """All-gather shards and multiply them by this rank's matrix (columns, n). Return both results.

        `keep`: the gathered tensor stays valid. Otherwise it is valid until the next gather of any kind.
        """

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        """Multiply whole (rows, k) by matrix (k, n), and reduce-scatter the sum over ranks to (rows / size, n).

        `awaited`: the caller waits for the result at once and has no other work to overlap.
        """


@dataclass(frozen=True)
class LinearPlan:
    """The schedules of one linear."""

    forward: Schedule
    backward: Schedule

    @classmethod
    def always(cls, schedule: Schedule) -> LinearPlan:
        """Return the plan with one schedule for both passes."""
        return cls(schedule, schedule)


class PlainSchedule(ABC):
    """Products in one piece before or after their collective. Children define the two collectives."""

    @abstractmethod
    def gather(self, shard: Tensor) -> Pending:
        """All-gather (rows, columns) shards to (size * rows, columns)."""

    @abstractmethod
    def scatter(self, partial: Tensor) -> Tensor:
        """Reduce-scatter a (rows, n) matrix: return this rank's (rows / size, n) of the sum over ranks."""

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        whole = self.gather(shard)()
        return whole, whole @ matrix

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        summed = self.scatter(whole @ matrix)
        return lambda: summed


class LocalSchedule(PlainSchedule):
    """One process with the whole of every tensor: no communication."""

    rank, size, group, divisor = 0, 1, None, 1

    def gather(self, shard: Tensor) -> Pending:
        return lambda: shard

    def scatter(self, partial: Tensor) -> Tensor:
        return partial


class SequentialSchedule(PlainSchedule):
    """All-gather, product, reduce-scatter, one after the other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.divisor = self.size

    def gather(self, shard: Tensor) -> Pending:
        whole = gather_rows(shard, self.group)
        return lambda: whole

    def scatter(self, partial: Tensor) -> Tensor:
        return scatter_rows(partial, self.group)


class NoCommunicationSchedule(PlainSchedule):
    """The sequential schedule with its communication removed, to time a step's products alone. Results are wrong.

    A gathered tensor is replaced by copies of the first shard of that shape, so that products use real numbers.
    """

    group = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.divisor = rank, size, size
        self.replacements: dict[torch.Size, Tensor] = {}

    def gather(self, shard: Tensor) -> Pending:
        if shard.shape not in self.replacements:
            self.replacements[shard.shape] = shard.detach().repeat(self.size, 1)
        whole = self.replacements[shard.shape]
        return lambda: whole

    def scatter(self, partial: Tensor) -> Tensor:
        return partial.view(self.size, -1, partial.shape[1])[self.rank]
