"""Collectives over the data-parallel group that count the bytes sent to each peer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm import collectives, shared_memory_all_gather
from tpbench.comm.shared_memory_all_gather import SharedMemoryAllGather
from tpbench.workloads.embedding_grad.traffic.formulas import COUNT_BYTES


class CountedCollectives:
    """Collectives, and a count of their payload in bytes.

    Each collective counts the bytes that it must send. A reduce-scatter counts one part for each peer. An all-reduce
    counts that and the part of the sum that it sends back. The library's routing (rings, trees) does not matter.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size
        self.sent_bytes = [0] * world_size
        """Bytes sent to each rank since `reset`; for this rank always 0."""

    def reset(self) -> None:
        """Set the counts to zero."""
        self.sent_bytes = [0] * self.world_size

    def all_to_all(self, received: Tensor, sent: Tensor, receive_rows: Sequence[int], send_rows: Sequence[int]) -> None:
        """Send `send_rows[rank]` rows of `sent`, in rank order, to each rank. Raise ValueError for rows to itself."""
        if send_rows[self.rank] or receive_rows[self.rank]:
            raise ValueError(f"rank {self.rank} would send itself {send_rows[self.rank]} rows")
        row_bytes = sent[0:1].nbytes if len(sent) else 0
        self._count([rows * row_bytes for rows in send_rows])
        dist.all_to_all_single(received, sent, list(receive_rows), list(send_rows), group=self.group)

    def all_gather(self, gathered: Tensor, own: Tensor) -> None:
        """Fill `gathered`, (world_size * rows, ...), with the (rows, ...) tensors of all ranks."""
        self._count([own.nbytes] * self.world_size)
        collectives.all_gather(gathered, own, group=self.group)

    def reduce_scatter_mean(self, part: Tensor, whole: Tensor) -> None:
        """Fill `part` with this rank's part of the mean of all ranks' `whole`."""
        self._count([part.nbytes] * self.world_size)
        collectives.reduce_scatter(part, whole, op=dist.ReduceOp.AVG, group=self.group)

    def all_reduce_mean(self, whole: Tensor) -> None:
        """Replace `whole` by its mean over all ranks."""
        self._count([2 * whole.nbytes // self.world_size] * self.world_size)
        dist.all_reduce(whole, op=dist.ReduceOp.AVG, group=self.group)

    def sparse_all_reduce(self, own: Tensor) -> Tensor:
        """Return the coalesced sum of the coalesced COO tensors of all ranks."""
        self._count([own.indices().nbytes + own.values().nbytes] * self.world_size)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse invariant checks")
            dist.all_reduce(own, group=self.group)
            return own.coalesce()

    @cached_property
    def shared_memory(self) -> SharedMemoryAllGather | None:
        """All-gather for counts if all ranks run on one machine. The first access is collective."""
        return shared_memory_all_gather.connect(self.group)

    def exchange_counts(self, sent: Sequence[int]) -> list[int]:
        """Return how many rows each rank has for this rank, given how many this rank has for each. On the CPU."""
        self._count([COUNT_BYTES] * self.world_size)
        if self.shared_memory is not None:
            return [counts[self.rank] for counts in self.shared_memory.gather(sent)]
        sent_counts = torch.tensor(sent, dtype=torch.int64)
        received_counts = torch.empty_like(sent_counts)
        dist.all_to_all_single(received_counts, sent_counts, group=self.group)
        counts: list[int] = received_counts.tolist()
        return counts

    def gather_counts(self, own: Sequence[int]) -> list[list[int]]:
        """Return the counts of all ranks, by rank. On the CPU."""
        self._count([COUNT_BYTES * len(own)] * self.world_size)
        if self.shared_memory is not None:
            return self.shared_memory.gather(own)
        own_counts = torch.tensor(own, dtype=torch.int64)
        gathered = own_counts.new_empty(self.world_size * len(own_counts))
        collectives.all_gather(gathered, own_counts, group=self.group)
        counts: list[list[int]] = gathered.view(self.world_size, -1).tolist()
        return counts

    def count_push(self, sizes: Sequence[int]) -> None:
        """Count the bytes that a kernel writes into each rank's memory. Raise ValueError for bytes to itself."""
        if sizes[self.rank]:
            raise ValueError(f"rank {self.rank} would send itself {sizes[self.rank]} bytes")
        self._count(sizes)

    def _count(self, sizes: Sequence[int]) -> None:
        for peer, size in enumerate(sizes):
            self.sent_bytes[peer] += 0 if peer == self.rank else size
