"""The coalesced COO tensor of every rank to every rank: what generic sparse reductions do."""

from __future__ import annotations

from tpbench.workloads.embedding_grad import traffic
from tpbench.workloads.embedding_grad.sparse import MergingExchange, gather


class SparseAllGather(MergingExchange):
    """Numbers (int64, as in torch's COO tensors) and values, padded to the rank with most; each takes what it owns."""

    counts: list[list[int]]
    """Rows that each rank touched, by owner."""

    @property
    def most(self) -> int:
        """Rows of the rank that touched most."""
        return max(map(sum, self.counts))

    def exchange_counts(self) -> None:
        self.found = self.index.find()
        assert self.found is not None
        self.counts = self.wire.gather_counts(self.found.counts)

    def exchange_ids(self) -> None:
        assert self.found is not None
        mine = self.found.rows.new_zeros(self.most).long()
        mine[: len(self.found.rows)] = self.found.rows
        self.ids = mine.new_empty(self.wire.world_size * self.most)
        self.wire.all_gather(self.ids, mine)

    def gather(self) -> None:
        assert self.found is not None
        grad = self.inputs.grad
        self.mine = grad.new_empty(self.most, grad.shape[1])
        gather(grad, self.found.rows, self.mine[: len(self.found.rows)])

    def exchange_values(self) -> None:
        assert self.mine is not None
        self.values = self.mine.new_empty(self.wire.world_size * self.most, self.mine.shape[1])
        self.wire.all_gather(self.values, self.mine)

    def segments(self) -> list[tuple[int, int]]:
        return [self._segment(source) for source in range(self.wire.world_size)]

    def _segment(self, source: int) -> tuple[int, int]:
        """A rank's own rows come last in its list."""
        rank, counts = self.inputs.rank, self.counts[source]
        if source == rank:
            return (0, 0)
        before = sum(count for owner, count in enumerate(counts[:rank]) if owner != source)
        return source * self.most + before, counts[rank]

    def formula(self) -> list[int]:
        return traffic.sparse_all_gather(self.inputs.counts, self.inputs.row_bytes)
