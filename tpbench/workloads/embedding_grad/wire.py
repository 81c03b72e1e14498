"""What exchanges send with: collectives, counts through a board, pushes; and a count of the bytes for each peer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm import collectives
from tpbench.comm.shared_memory_all_gather import Board, board
from tpbench.workloads.embedding_grad.traffic import COUNT_BYTES


class Wire:
    """Collectives over the data-parallel group.

    The count is of payload, as if each collective sent what it must: a reduce-scatter a peer its part, an all-reduce
    that and the sum's part back. How a library routes it (rings, trees) is its own affair.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size
        self.to_peer = [0] * world_size
        """Bytes handed over for each rank since `reset`; for this rank always 0."""

    def reset(self) -> None:
        """Begin to count anew."""
        self.to_peer = [0] * self.world_size

    def all_to_all(self, out: Tensor, leaving: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Rows of `leaving`, in the order of ranks, to their ranks: `sent[rank]` of them, none to this one."""
        if sent[self.rank] or received[self.rank]:
            raise ValueError(f"rank {self.rank} would send itself {sent[self.rank]} rows")
        row = leaving[0:1].nbytes if len(leaving) else 0
        self._count([count * row for count in sent])
        dist.all_to_all_single(out, leaving, list(received), list(sent), group=self.group)

    def all_gather(self, out: Tensor, mine: Tensor) -> None:
        """(world_size * rows, ...) from everybody's (rows, ...)."""
        self._count([mine.nbytes] * self.world_size)
        collectives.all_gather(out, mine, group=self.group)

    def reduce_scatter_mean(self, out: Tensor, whole: Tensor) -> None:
        """The mean over ranks of this rank's part of everybody's `whole`."""
        self._count([out.nbytes] * self.world_size)
        collectives.reduce_scatter(out, whole, op=dist.ReduceOp.AVG, group=self.group)

    def all_reduce_mean(self, whole: Tensor) -> None:
        """The mean over ranks of everybody's `whole`, in its place."""
        self._count([2 * whole.nbytes // self.world_size] * self.world_size)
        dist.all_reduce(whole, op=dist.ReduceOp.AVG, group=self.group)

    def sparse_all_reduce(self, mine: Tensor) -> Tensor:
        """The sum over ranks of everybody's coalesced COO tensor, coalesced."""
        self._count([mine.indices().nbytes + mine.values().nbytes] * self.world_size)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse invariant checks")
            dist.all_reduce(mine, group=self.group)
            return mine.coalesce()

    @cached_property
    def board(self) -> Board | None:
        """Where counts are exchanged if all ranks are on one machine. Collective when first asked for."""
        return board(self.group, self.rank, self.world_size)

    def exchange_counts(self, sent: Sequence[int]) -> list[int]:
        """How many rows each rank has for this one, from how many this one has for each. On the CPU."""
        self._count([COUNT_BYTES] * self.world_size)
        if self.board is not None:
            return [counts[self.rank] for counts in self.board.gather(sent)]
        leaving = torch.tensor(sent, dtype=torch.int64)
        received = torch.empty_like(leaving)
        dist.all_to_all_single(received, leaving, group=self.group)
        counts: list[int] = received.tolist()
        return counts

    def gather_counts(self, mine: Sequence[int]) -> list[list[int]]:
        """Everybody's counts, by rank. On the CPU."""
        self._count([COUNT_BYTES * len(mine)] * self.world_size)
        if self.board is not None:
            return self.board.gather(mine)
        counts = torch.tensor(mine, dtype=torch.int64)
        everyone = counts.new_empty(self.world_size * len(counts))
        collectives.all_gather(everyone, counts, group=self.group)
        rows: list[list[int]] = everyone.view(self.world_size, -1).tolist()
        return rows

    def push(self, sizes: Sequence[int]) -> None:
        """A kernel writes so many bytes into each rank's memory, none into this one's."""
        if sizes[self.rank]:
            raise ValueError(f"rank {self.rank} would send itself {sizes[self.rank]} bytes")
        self._count(sizes)

    def _count(self, sizes: Sequence[int]) -> None:
        for peer, size in enumerate(sizes):
            self.to_peer[peer] += 0 if peer == self.rank else size
