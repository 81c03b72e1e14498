"""Sparse reduce-scatter without collectives: one kernel writes the touched rows into their owners' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad import merge_kernel, push_kernel, traffic
from tpbench.workloads.embedding_grad.counted_collectives import CountedCollectives
from tpbench.workloads.embedding_grad.exchange import Phase
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.merge import MisplacedRow
from tpbench.workloads.embedding_grad.sparse import SparseExchange
from tpbench.workloads.embedding_grad.touched_rows import RowFinder

if TYPE_CHECKING:
    from tpbench.comm.symmetric_buffers import SymmetricBuffers


@dataclass(frozen=True)
class Inbox:
    """Memory for arriving rows. It is addressed by row, so that no rank need know what the others send."""

    values: Tensor
    """(ranks - 1, rows_per_rank, width) of this rank: a slice of the table for each other rank."""
    marks: Tensor
    """(ranks, rows_per_rank) int32 of this rank: the exchange in which a rank last touched a row, at first 0."""
    value_addresses: Tensor
    """(ranks,) int64: the addresses of all ranks' values."""
    mark_addresses: Tensor
    """(ranks,) int64: the addresses of all ranks' marks."""


def make_inboxes(buffers: SymmetricBuffers, inputs: EmbeddingGradInputs) -> list[Inbox]:
    """Return the two inboxes of `SparseSymmetric`. Collective."""
    ranks, rows_per_rank = inputs.partition.world_size, inputs.partition.rows_per_rank
    inboxes = []
    for _ in range(2):
        values = buffers.next("values", (ranks - 1, rows_per_rank, inputs.grad.shape[1]), inputs.grad.dtype)
        marks = buffers.next("marks", (ranks, rows_per_rank), torch.int32)
        inboxes.append(Inbox(values[inputs.rank], marks[inputs.rank], addresses(values), addresses(marks)))
    return inboxes


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Return the addresses of tensors for a kernel, as int64 on the device of the first."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=tensors[0].device)


class SparseSymmetric(SparseExchange):
    """Push rows, wait for all ranks, merge.

    Two inboxes alternate. A rank pushes into an inbox only after all ranks merged from it: all ranks have passed the
    barrier of the exchange in between, and each reaches that barrier after its merge.
    """

    def __init__(
        self,
        inputs: EmbeddingGradInputs,
        comm: CountedCollectives,
        finder: RowFinder,
        inboxes: Sequence[Inbox],
        barrier: Callable[[], None],
        workspace_gib: float,
    ) -> None:
        """Use `barrier` to hold back the current stream until the streams of all ranks reach it.

        Later work must see what the ranks wrote before the barrier.
        """
        super().__init__(inputs, comm, finder)
        self.inboxes, self.barrier, self.workspace_gib = inboxes, barrier, workspace_gib
        self.epoch = 0
        self.misplaced = torch.zeros(1, dtype=torch.int32, device=inputs.device)
        self.phases = (
            Phase("counts", self.find, after="batch", on_host=True),
            Phase("values", self.push),
            Phase("merge", self.merge),
        )

    @property
    def inbox(self) -> Inbox:
        """The inbox of the current exchange."""
        return self.inboxes[self.epoch % 2]

    def find(self) -> None:
        """Find this rank's touched rows and start their upload. No other rank needs the counts."""
        self.touched = self.finder.find()
        if self.touched is None:
            raise RuntimeError("the touched rows are not known: only a dense exchange can do this step")
        _ = self.touched.rows  # starts the upload, because the push needs the rows first

    def push(self) -> None:
        """Write the rows into their owners' inboxes and wait for the rows of all ranks."""
        assert self.touched is not None
        self.epoch = self.epoch % (2**31 - 2) + 1  # an int32 mark; 0 means never written
        push_kernel.push_rows(
            self.inputs.grad,
            self.touched.rows,
            self.inbox.value_addresses,
            self.inbox.mark_addresses,
            epoch=self.epoch,
            rank=self.inputs.rank,
            misplaced=self.misplaced,
        )
        row_bytes = self.inputs.row_bytes + traffic.MARK_BYTES
        counts = enumerate(self.touched.counts)
        self.comm.count_push([0 if owner == self.inputs.rank else count * row_bytes for owner, count in counts])
        self.barrier()

    def merge(self) -> None:
        """Merge the rows with this exchange's mark into this rank's slice."""
        scale = 1.0 / self.inputs.partition.world_size
        values, marks = self.inbox.values, self.inbox.marks
        merge_kernel.merge_rows(
            self.inputs.own_slice, values, marks, rank=self.inputs.rank, scale=scale, epoch=self.epoch
        )

    def result(self) -> Tensor:
        if misplaced := int(self.misplaced):
            raise MisplacedRow(f"rank {self.inputs.rank} touched {misplaced} rows that are not of the table")
        return self.inputs.own_slice

    def expected_bytes(self) -> list[int]:
        return traffic.sparse_push(self.inputs.counts, self.inputs.row_bytes)

    def columns(self) -> dict[str, Any]:
        return {**super().columns(), "workspace_gib": self.workspace_gib}
