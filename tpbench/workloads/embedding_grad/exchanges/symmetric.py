"""Sparse reduce-scatter without collectives: a kernel writes the touched rows into their owners' memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpbench.comm.collectives import on_one_machine
from tpbench.workloads.embedding_grad.exchanges import Exchange, ExchangeContext, Phase, row_kernels
from tpbench.workloads.embedding_grad.exchanges.search import DeviceSearch, Replayed
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad


@dataclass(frozen=True)
class Inboxes:
    """Memory of all ranks for arriving rows. It is addressed by row, so that no rank needs to know what others send.

    An inbox has values, (ranks - 1, rows_per_rank, width), a slice of the table for each other rank; and marks,
    (ranks, rows_per_rank) int32, the exchange in which a rank last touched a row, at first 0.

    Two inboxes of a rank alternate. A rank pushes into an inbox only after all ranks merged from it: all ranks have
    passed the barrier of the exchange in between, and each reaches that barrier after its merge.
    """

    values: Tensor
    """(inboxes, ranks) int64: the addresses of all ranks' values."""
    marks: Tensor
    """(inboxes, ranks) int64: the addresses of all ranks' marks."""
    barrier: Callable[[], None]
    """Hold back the current stream until the streams of all ranks reach the barrier. Later work sees what the ranks
    wrote before it. The function also keeps the memory."""
    gib: float = 0.0
    """Memory of this rank that they take, in GiB."""


def connect(inputs: EmbeddingGradInputs) -> Inboxes:
    """Return two inboxes for each rank. Collective. Raises RuntimeError if the ranks are on several machines."""
    from tpbench.comm.symmetric_buffers import SymmetricBuffers

    if not on_one_machine(inputs.group):
        raise RuntimeError("the ranks are on several machines: sparse_symmetric writes into its peers' memory")
    buffers = SymmetricBuffers(inputs.group, inputs.device, "kernel")
    ranks, rows_per_rank = inputs.world_size, inputs.rows_per_rank
    shape = ranks - 1, rows_per_rank, inputs.grad.shape[1]
    values = [buffers.next("values", shape, inputs.grad.dtype) for _ in range(2)]
    marks = [buffers.next("marks", (ranks, rows_per_rank), torch.int32) for _ in range(2)]
    return Inboxes(addresses(values), addresses(marks), buffers.barrier, buffers.gib)


def addresses(inboxes: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the addresses of each inbox's tensors, by rank, for a kernel: int64 on the device of the first."""
    rows = [[tensor.data_ptr() for tensor in tensors] for tensors in inboxes]
    return torch.tensor(rows, dtype=torch.int64, device=inboxes[0][0].device)


class SparseSymmetric(Exchange):
    """Search on the GPU, push, wait for all ranks, merge. The host only queues kernels: a CUDA graph can hold them."""

    def __init__(self, problem: EmbeddingGrad, context: ExchangeContext) -> None:
        super().__init__(context.inputs, context.comm)
        inputs = self.inputs
        self.search, self.inboxes = DeviceSearch(inputs, by_owner=False), connect(inputs)
        self.overwrites = inputs.own_slice
        self.phases = (
            Phase("counts", self.search.run, after="batch"),
            Phase("values", Replayed(self.push, inputs.device)),
            Phase("merge", self.merge),
        )

    def push(self) -> None:
        """Write the rows into their owners' inboxes and wait for the rows of all ranks."""
        row_kernels.push_rows(
            self.inputs.grad,
            self.search.lists[0],
            self.inboxes.values,
            self.inboxes.marks,
            epoch=self.search.epoch,
            rank=self.inputs.rank,
            misplaced=self.search.misplaced,
            count=self.search.counts,
        )
        self.inboxes.barrier()

    def merge(self) -> None:
        """Merge the rows with this exchange's mark into this rank's slice."""
        row_kernels.merge_rows(
            self.inputs.own_slice,
            self.inboxes.values,
            self.inboxes.marks,
            self.search.epoch,
            rank=self.inputs.rank,
            scale=1.0 / self.inputs.world_size,
        )

    def result(self) -> Tensor:
        """Return the slice. Count the bytes that the last exchange sent: during it, only the GPU knew the rows."""
        if misplaced := int(self.search.misplaced):
            raise RuntimeError(f"{misplaced} tokens have rows that are not of the table")
        owners = self.search.lists[0, : int(self.search.counts)] // self.inputs.rows_per_rank
        pushed = torch.bincount(owners, minlength=self.comm.world_size).tolist()
        self.comm.reset()
        self.comm.count([rows * (self.inputs.row_bytes + 4) for rows in pushed])  # a row and its mark, an int32
        return self.inputs.own_slice

    def columns(self) -> dict[str, Any]:
        return {"workspace_gib": self.inboxes.gib}
