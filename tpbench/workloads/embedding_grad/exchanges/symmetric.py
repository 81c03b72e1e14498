"""Sparse reduce-scatter without collectives: a kernel writes the touched rows into their owners' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpbench.comm.collectives import on_one_machine
from tpbench.workloads.embedding_grad.exchanges.base import Exchange, Phase
from tpbench.workloads.embedding_grad.exchanges.sparse import SparseExchange
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.row_operations import merge_kernel
from tpbench.workloads.embedding_grad.row_operations.merge import MisplacedRow
from tpbench.workloads.embedding_grad.row_operations.push_kernel import push_rows
from tpbench.workloads.embedding_grad.row_operations.search import DeviceSearch, Replayed, RowFinder
from tpbench.workloads.embedding_grad.traffic import formulas
from tpbench.workloads.embedding_grad.traffic.collectives import CountedCollectives

if TYPE_CHECKING:
    from tpbench.comm.symmetric_buffers import SymmetricBuffers


@dataclass(frozen=True)
class Inbox:
    """Memory for arriving rows. It is addressed by row, so that a rank does not need to know what the others send."""

    values: Tensor
    """(ranks - 1, rows_per_rank, width) of this rank: a slice of the table for each other rank."""
    marks: Tensor
    """(ranks, rows_per_rank) int32 of this rank: the exchange in which a rank last touched a row, at first 0."""
    value_addresses: Tensor
    """(ranks,) int64: the addresses of all ranks' values."""
    mark_addresses: Tensor
    """(ranks,) int64: the addresses of all ranks' marks."""


@dataclass(frozen=True)
class ConnectedInboxes:
    """The inboxes of a rank, which its peers write into."""

    inboxes: Sequence[Inbox]
    """Exchanges use them in turn."""
    barrier: Callable[[], None]
    """Hold back the current stream until the streams of all ranks reach the barrier. Later work sees what the ranks
    wrote before it."""
    gib: float = 0.0
    """Memory of this rank that they take, in GiB."""


def connect(inputs: EmbeddingGradInputs) -> ConnectedInboxes:
    """Return two inboxes for each rank. Collective. Raises RuntimeError if the ranks are on several machines."""
    from tpbench.comm.symmetric_buffers import SymmetricBuffers

    if not on_one_machine(inputs.group):
        raise RuntimeError("the ranks are on several machines: sparse_symmetric writes into its peers' memory")
    buffers = SymmetricBuffers(inputs.group, inputs.device, "kernel")
    inboxes = make_inboxes(buffers, inputs)
    return ConnectedInboxes(inboxes, buffers.barrier, buffers.gib)


def make_inboxes(buffers: SymmetricBuffers, inputs: EmbeddingGradInputs) -> list[Inbox]:
    """Return the two inboxes of a symmetric exchange. Collective."""
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


class PeerInboxes:
    """The inboxes of all ranks, used in turn.

    Two inboxes alternate. A rank pushes into an inbox only after all ranks merged from it: all ranks have passed the
    barrier of the exchange in between, and each reaches that barrier after its merge. The number of the exchange is on
    the device, so that a replayed CUDA graph advances it, too.
    """

    def __init__(self, inputs: EmbeddingGradInputs, connected: ConnectedInboxes, epoch: Tensor) -> None:
        """`epoch`: (1,) int32 on the device, the number of the exchange. The caller increases it by 1 before a push."""
        self.inputs, self.connected, self.epoch = inputs, connected, epoch
        self.values = torch.stack([inbox.value_addresses for inbox in connected.inboxes])
        self.marks = torch.stack([inbox.mark_addresses for inbox in connected.inboxes])
        self.misplaced = torch.zeros(1, dtype=torch.int32, device=inputs.device)

    def push(self, rows: Tensor, count: Tensor | None = None) -> None:
        """Write the rows into their owners' inboxes and wait for the rows of all ranks.

        With `count`, (1,) int32 on the device, only the first `count` rows are written.
        """
        push_rows(
            self.inputs.grad,
            rows,
            self.values,
            self.marks,
            epoch=self.epoch,
            rank=self.inputs.rank,
            misplaced=self.misplaced,
            count=count,
        )
        self.connected.barrier()

    def merge(self) -> None:
        """Merge the rows with this exchange's mark into this rank's slice."""
        scale = 1.0 / self.inputs.partition.world_size
        own, rank = self.inputs.own_slice, self.inputs.rank
        merge_kernel.merge_inbox(own, self.values, self.marks, self.epoch, rank=rank, scale=scale)

    def pushed_bytes(self, touched: Sequence[int]) -> list[int]:
        """Return the bytes pushed to each rank, from the number of touched rows that each rank owns."""
        row_bytes = self.inputs.row_bytes + formulas.MARK_BYTES
        return [0 if owner == self.inputs.rank else count * row_bytes for owner, count in enumerate(touched)]

    def verify(self) -> None:
        """Raise MisplacedRow if this rank pushed a row outside the table."""
        if misplaced := int(self.misplaced):
            raise MisplacedRow(f"rank {self.inputs.rank} touched {misplaced} rows that are not of the table")


class PushingExchange(Exchange):
    """Exchange that pushes rows into its peers' inboxes. A row takes as many bytes no matter who found it."""

    peers: PeerInboxes

    def expected_bytes(self) -> list[int]:
        return formulas.sparse_push(self.inputs.counts, self.inputs.row_bytes)

    def columns(self) -> dict[str, Any]:
        return {**super().columns(), "workspace_gib": self.peers.connected.gib}


class SparseSymmetric(PushingExchange, SparseExchange):
    """Push rows that the host found, wait for all ranks, merge."""

    def __init__(
        self, inputs: EmbeddingGradInputs, comm: CountedCollectives, finder: RowFinder, connected: ConnectedInboxes
    ) -> None:
        super().__init__(inputs, comm, finder)
        self.peers = PeerInboxes(inputs, connected, torch.zeros(1, dtype=torch.int32, device=inputs.device))
        self.phases = (
            Phase("counts", self.find, after="batch", on_host=True),
            Phase("values", self.push),
            Phase("merge", self.merge),
        )

    def find(self) -> None:
        """Find this rank's touched rows and start their upload. No other rank needs the counts."""
        self.touched = self.finder.find()
        if self.touched is None:
            raise RuntimeError("the touched rows are not known: only a dense exchange can do this step")
        _ = self.touched.rows  # starts the upload, because the push needs the rows first
        self.peers.epoch.add_(1)

    def push(self) -> None:
        """Write the rows into their owners' inboxes and wait for the rows of all ranks."""
        assert self.touched is not None
        self.comm.count_push(self.peers.pushed_bytes(self.touched.counts))
        self.peers.push(self.touched.rows)

    def merge(self) -> None:
        """Merge the rows with this exchange's mark into this rank's slice."""
        self.peers.merge()

    def result(self) -> Tensor:
        self.peers.verify()
        return self.inputs.own_slice


class SparseSymmetricGpu(PushingExchange):
    """Search on the GPU, push, wait for all ranks, merge. The host only queues kernels: a CUDA graph can hold them.

    The number of touched rows never leaves the GPU. The host reads the rows only for the check.
    """

    chosen = "sparse"

    def __init__(self, inputs: EmbeddingGradInputs, comm: CountedCollectives, connected: ConnectedInboxes) -> None:
        super().__init__(inputs, comm)
        self.overwrites = inputs.own_slice
        self.search = DeviceSearch(inputs, by_owner=False)
        self.peers = PeerInboxes(inputs, connected, self.search.epoch)
        self.phases = (
            Phase("counts", self.search.run, after="batch"),
            Phase("values", Replayed(self.push, inputs.device)),
            Phase("merge", self.peers.merge),
        )

    def push(self) -> None:
        """Write the rows into their owners' inboxes and wait for the rows of all ranks."""
        self.peers.push(self.search.lists[0], self.search.counts)

    def known_rows(self) -> Tensor:
        return self.search.lists[0, : int(self.search.counts)]

    def result(self) -> Tensor:
        """Return the slice. Count the bytes that the last exchange sent: during it, only the GPU knew the rows."""
        self.search.verify()
        self.peers.verify()
        owners = self.known_rows() // self.inputs.partition.rows_per_rank
        self.comm.reset()
        self.comm.count_push(self.peers.pushed_bytes(torch.bincount(owners, minlength=self.comm.world_size).tolist()))
        return self.inputs.own_slice
