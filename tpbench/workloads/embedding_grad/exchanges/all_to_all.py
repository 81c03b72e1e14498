"""Sparse reduce-scatter by all-to-alls: each touched row goes to its owner, which merges it into its slice."""

from __future__ import annotations

import itertools

from torch import Tensor

from tpbench.workloads.embedding_grad.exchanges.sparse import MergingExchange, gather
from tpbench.workloads.embedding_grad.row_operations.touched_rows import TouchedRows
from tpbench.workloads.embedding_grad.traffic import formulas


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
