"""The sparse reduce-scatter without collectives: one kernel writes the touched rows into their owners' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad import merge_kernel, push_kernel, traffic
from tpbench.workloads.embedding_grad.exchange import Phase
from tpbench.workloads.embedding_grad.index import Index
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.merge import MisplacedRow
from tpbench.workloads.embedding_grad.sparse import SparseExchange
from tpbench.workloads.embedding_grad.wire import Wire

if TYPE_CHECKING:
    from tpbench.comm.symmetric_buffers import Arena


@dataclass(frozen=True)
class Inbox:
    """Where rows arrive. It is addressed by row, so that no rank need know what others send."""

    values: Tensor
    """(ranks - 1, rows_each, width), this rank's: a slice for each other rank."""
    marks: Tensor
    """(ranks, rows_each) int32, this rank's: the exchange in which a rank last touched a row; at first zeros."""
    values_of: Tensor
    """(ranks,) int64: addresses of everybody's values."""
    marks_of: Tensor


def inboxes(arena: Arena, inputs: Inputs) -> list[Inbox]:
    """The two that alternate. Collective."""
    ranks, rows_each, width = inputs.owners.world_size, inputs.owners.rows_each, inputs.grad.shape[1]
    found = []
    for _ in range(2):
        values = arena.next("values", (ranks - 1, rows_each, width), inputs.grad.dtype)
        marks = arena.next("marks", (ranks, rows_each), torch.int32)
        found.append(Inbox(values[inputs.rank], marks[inputs.rank], addresses(values), addresses(marks)))
    return found


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Where they begin, for a kernel: int64 on the first one's device."""
    return torch.tensor([each.data_ptr() for each in tensors], dtype=torch.int64, device=tensors[0].device)


class SparseSymmetric(SparseExchange):
    """Push, meet, merge. Two inboxes alternate: who pushes into one has met everybody after they last merged from it,
    for in the exchange between the two all ranks meet."""

    def __init__(
        self,
        inputs: Inputs,
        wire: Wire,
        index: Index,
        inboxes: Sequence[Inbox],
        meet: Callable[[], None],
        workspace_gib: float,
    ) -> None:
        """`meet`: on the current stream, nothing later begins before all ranks' streams are there, and it sees what
        they wrote before."""
        super().__init__(inputs, wire, index)
        self.inboxes, self.meet, self.workspace_gib = inboxes, meet, workspace_gib
        self.turn = 0
        self.misplaced = torch.zeros(1, dtype=torch.int32, device=inputs.device)
        self.phases = (
            Phase("counts", self.find, after="batch", on_host=True),
            Phase("values", self.push),
            Phase("merge", self.merge),
        )

    @property
    def inbox(self) -> Inbox:
        """This exchange's."""
        return self.inboxes[self.turn % 2]

    def find(self) -> None:
        """What this rank touched; nobody else need know."""
        self.found = self.index.find()
        if self.found is None:
            raise RuntimeError("the touched rows are not known: only a dense exchange can do this step")
        _ = self.found.rows  # on their way: the push needs them at once

    def push(self) -> None:
        """The rows to their owners, and wait until everybody's are there."""
        assert self.found is not None
        # Kernels know the exchange by its number in 32 bits; 0 is of none.
        self.turn = self.turn % (2**31 - 2) + 1
        push_kernel.push_rows(
            self.inputs.grad, self.found.rows, self.inbox.values_of, self.inbox.marks_of, epoch=self.turn,
            rank=self.inputs.rank, rows_each=self.inputs.owners.rows_each, misplaced=self.misplaced,
        )  # fmt: skip
        row = self.inputs.row_bytes + traffic.MARK_BYTES
        self.wire.push([0 if owner == self.inputs.rank else n * row for owner, n in enumerate(self.found.counts)])
        self.meet()

    def merge(self) -> None:
        """What is marked as of this exchange into this rank's slice."""
        merge_kernel.merge_rows(
            self.inputs.own, self.inbox.values, self.inbox.marks, rank=self.inputs.rank,
            scale=1.0 / self.inputs.owners.world_size, epoch=self.turn,
        )  # fmt: skip

    def result(self) -> Tensor:
        if misplaced := int(self.misplaced):
            raise MisplacedRow(f"rank {self.inputs.rank} touched {misplaced} rows that are not of the table")
        return self.inputs.own

    def release(self) -> None:
        self.found = None

    def formula(self) -> list[int]:
        return traffic.sparse_push(self.inputs.counts, self.inputs.row_bytes)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "workspace_gib": self.workspace_gib}
