"""All-gather of every rank's coalesced COO tensor, as generic sparse reductions do it."""

from __future__ import annotations

from tpbench.workloads.embedding_grad.exchanges.sparse import MergingExchange, gather
from tpbench.workloads.embedding_grad.traffic import formulas


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
