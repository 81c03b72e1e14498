"""Common parts of the sparse exchanges: the touched rows, and the slice into which received rows are merged."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.exchanges.base import Exchange, Phase
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.row_operations.merge import Merge
from tpbench.workloads.embedding_grad.row_operations.touched_rows import RowFinder, TouchedRows
from tpbench.workloads.embedding_grad.traffic.counted_collectives import CountedCollectives


class SparseExchange(Exchange):
    """Exchange of the touched rows. The result replaces this rank's slice of the gradient."""

    chosen = "sparse"

    def __init__(self, inputs: EmbeddingGradInputs, comm: CountedCollectives, finder: RowFinder) -> None:
        super().__init__(inputs, comm)
        self.finder = finder
        self.overwrites = inputs.own_slice
        self.touched: TouchedRows | None = None

    def known_rows(self) -> Tensor | None:
        return None if self.touched is None else self.touched.rows

    def release(self) -> None:
        self.touched = None


def gather(table: Tensor, rows: Tensor, output: Tensor) -> None:
    """Set `output[i] = table[rows[i]]`."""
    if not table.is_cuda:
        torch.index_select(table, 0, rows, out=output)
        return
    from tpbench.workloads.embedding_grad.row_operations.gather_kernel import gather_rows

    gather_rows(table, rows, output)


class MergingExchange(SparseExchange):
    """Exchange that receives a segment of rows from each rank, numbers first, and merges them into its slice."""

    def __init__(self, inputs: EmbeddingGradInputs, comm: CountedCollectives, finder: RowFinder, merge: Merge) -> None:
        super().__init__(inputs, comm, finder)
        self.merge = merge
        self.received_ids: Tensor | None = None
        self.received_values: Tensor | None = None
        self.sent_values: Tensor | None = None
        self.phases = (
            Phase("counts", self.exchange_counts, after="batch", on_host=True),
            Phase("ids", self.prepare_merge, after="forward"),
            Phase("gather", self.gather),
            Phase("values", self.exchange_values),
            Phase("merge", self.merge_values),
        )

    @abstractmethod
    def exchange_counts(self) -> None:
        """Find this rank's touched rows and learn how many rows each rank sends."""

    @abstractmethod
    def exchange_ids(self) -> None:
        """Receive the row numbers."""

    @abstractmethod
    def gather(self) -> None:
        """Copy the rows to send out of the table."""

    @abstractmethod
    def exchange_values(self) -> None:
        """Receive the rows."""

    @abstractmethod
    def segments(self) -> list[tuple[int, int]]:
        """Return, by source rank, the start and the number of the received rows that this rank owns."""

    def prepare_merge(self) -> None:
        """Give the merge the numbers of the received rows and of this rank's own touched rows."""
        self.exchange_ids()
        assert self.touched is not None and self.received_ids is not None
        own_count = self.touched.counts[self.inputs.rank]
        own_rows = self.touched.rows[len(self.touched.rows) - own_count :]  # own rows come last
        self.merge.place(own_rows, self.received_ids, self.segments())

    def merge_values(self) -> None:
        """Merge the received rows into this rank's slice."""
        assert self.received_values is not None
        self.merge(self.inputs.own_slice, self.received_values)

    def result(self) -> Tensor:
        self.merge.verify()
        return self.inputs.own_slice

    def release(self) -> None:
        super().release()
        self.received_ids = self.received_values = self.sent_values = None
        self.merge.release()
