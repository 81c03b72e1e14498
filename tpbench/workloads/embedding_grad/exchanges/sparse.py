"""Sparse exchanges by collectives: only touched rows travel to the ranks that own them."""

from __future__ import annotations

import itertools
from abc import abstractmethod

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.exchanges.base import Exchange, Phase
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.row_operations.merge import Merge
from tpbench.workloads.embedding_grad.row_operations.search import RowFinder, TouchedRows
from tpbench.workloads.embedding_grad.traffic import formulas
from tpbench.workloads.embedding_grad.traffic.collectives import CountedCollectives


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


class SparseAllToAll(MergingExchange):
    """All-to-alls of counts, of row numbers and of rows. Rows that this rank owns stay in place."""

    send_counts: list[int]
    """Number of rows that go to each rank."""
    receive_counts: list[int]
    """Number of rows that come from each rank."""

    def exchange_counts(self) -> None:
        touched = self.finder.find()
        if touched is None:
            raise RuntimeError(
                "the touched rows are not known: only a dense exchange, or sparse_auto, can do this step"
            )
        self.begin(touched, self.comm.exchange_counts(_without(touched.counts, self.inputs.rank)))

    def begin(self, touched: TouchedRows, receive_counts: list[int]) -> None:
        """Start a step whose counts are known. All later phases run on the device."""
        self.touched, self.receive_counts = touched, receive_counts
        self.send_counts = _without(touched.counts, self.inputs.rank)

    def exchange_ids(self) -> None:
        rows = self._rows_to_send
        self.received_ids = rows.new_empty(sum(self.receive_counts))
        self.comm.all_to_all(self.received_ids, rows, self.receive_counts, self.send_counts)

    def gather(self) -> None:
        grad, rows = self.inputs.grad, self._rows_to_send
        self.sent_values = grad.new_empty(len(rows), grad.shape[1])
        gather(grad, rows, self.sent_values)

    def exchange_values(self) -> None:
        assert self.sent_values is not None
        self.received_values = self.sent_values.new_empty(sum(self.receive_counts), self.inputs.grad.shape[1])
        self.comm.all_to_all(self.received_values, self.sent_values, self.receive_counts, self.send_counts)

    def segments(self) -> list[tuple[int, int]]:
        starts = itertools.accumulate(self.receive_counts, initial=0)
        return list(zip(starts, self.receive_counts, strict=False))

    @property
    def _rows_to_send(self) -> Tensor:
        assert self.touched is not None
        return self.touched.rows[: sum(self.send_counts)]

    def expected_bytes(self) -> list[int]:
        return formulas.sparse_all_to_all(self.inputs.counts, self.inputs.row_bytes)


def _without(counts: list[int], rank: int) -> list[int]:
    """Return the counts with 0 for this rank."""
    return [0 if owner == rank else count for owner, count in enumerate(counts)]


class SparseAllGather(MergingExchange):
    """All-gathers of row numbers (int64, as in torch's COO tensors) and of rows.

    Both are padded to the rank that touched most rows. Each rank merges the rows that it owns.
    """

    counts: list[list[int]]
    """Number of touched rows, by the rank that touched them and then their owner."""

    @property
    def padded_rows(self) -> int:
        """Number of rows of the rank that touched most."""
        return max(map(sum, self.counts))

    def exchange_counts(self) -> None:
        self.touched = self.finder.find()
        assert self.touched is not None
        self.counts = self.comm.gather_counts(self.touched.counts)

    def exchange_ids(self) -> None:
        assert self.touched is not None
        own_ids = self.touched.rows.new_zeros(self.padded_rows).long()
        own_ids[: len(self.touched.rows)] = self.touched.rows
        self.received_ids = own_ids.new_empty(self.comm.world_size * self.padded_rows)
        self.comm.all_gather(self.received_ids, own_ids)

    def gather(self) -> None:
        assert self.touched is not None
        grad, rows = self.inputs.grad, self.touched.rows
        self.sent_values = grad.new_empty(self.padded_rows, grad.shape[1])
        gather(grad, rows, self.sent_values[: len(rows)])

    def exchange_values(self) -> None:
        assert self.sent_values is not None
        gathered_rows = self.comm.world_size * self.padded_rows
        self.received_values = self.sent_values.new_empty(gathered_rows, self.sent_values.shape[1])
        self.comm.all_gather(self.received_values, self.sent_values)

    def segments(self) -> list[tuple[int, int]]:
        return [self._segment(source) for source in range(self.comm.world_size)]

    def _segment(self, source: int) -> tuple[int, int]:
        """Return where the rows for this rank start in a source's list, in which the source's own rows come last."""
        rank, counts = self.inputs.rank, self.counts[source]
        if source == rank:
            return (0, 0)
        rows_before = sum(count for owner, count in enumerate(counts[:rank]) if owner != source)
        return source * self.padded_rows + rows_before, counts[rank]

    def expected_bytes(self) -> list[int]:
        return formulas.sparse_all_gather(self.inputs.counts, self.inputs.row_bytes)


class TorchSparseAllReduce(SparseExchange):
    """All-reduce of a COO tensor: every rank gets the rows of all ranks, coalesced in the gradient's dtype."""

    def __init__(self, inputs: EmbeddingGradInputs, comm: CountedCollectives, finder: RowFinder) -> None:
        super().__init__(inputs, comm, finder)
        self.own: Tensor | None = None
        self.total: Tensor | None = None
        self.phases = (
            Phase("counts", self.find, after="batch", on_host=True),
            Phase("gather", self.gather),
            Phase("values", self.all_reduce),
            Phase("merge", self.copy_own_slice),
        )

    def find(self) -> None:
        """Find this rank's touched rows, without an exchange."""
        self.touched = self.finder.find()

    def gather(self) -> None:
        """Build a COO tensor of the whole table from this rank's rows."""
        assert self.touched is not None
        rows = self.touched.rows.sort().values.long()
        values = self.inputs.grad.index_select(0, rows)
        self.own = torch.sparse_coo_tensor(
            rows[None], values, tuple(self.inputs.grad.shape), is_coalesced=True, check_invariants=False
        )

    def all_reduce(self) -> None:
        """Sum over ranks."""
        assert self.own is not None
        self.total = self.comm.sparse_all_reduce(self.own.clone())

    def copy_own_slice(self) -> None:
        """Copy the mean of this rank's rows into its slice."""
        assert self.total is not None
        partition, rank = self.inputs.partition, self.inputs.rank
        rows = self.total.indices()[0]
        bounds = torch.tensor(partition.bounds[rank : rank + 2], device=rows.device)
        start, stop = torch.searchsorted(rows, bounds).tolist()
        values = self.total.values()[start:stop] * (1.0 / partition.world_size)
        self.inputs.own_slice[rows[start:stop] - partition.first_row(rank)] = values

    def release(self) -> None:
        super().release()
        self.own = self.total = None

    def expected_bytes(self) -> list[int]:
        return formulas.sparse_all_reduce(self.inputs.counts, self.inputs.row_bytes)
