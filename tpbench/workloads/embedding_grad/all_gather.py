"""The coalesced COO tensor of every rank to every rank: what generic sparse reductions do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad import traffic
from tpbench.workloads.embedding_grad.exchange import Phase
from tpbench.workloads.embedding_grad.index import Found, Index
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.merge import Merge, Received
from tpbench.workloads.embedding_grad.wire import Wire


class SparseAllGather:
    """Numbers (int64, as in torch's COO tensors) and values, padded to the rank with most; each takes what it owns."""

    def __init__(self, inputs: Inputs, wire: Wire, index: Index, merge: Merge) -> None:
        self.inputs, self.wire, self.index, self.merge = inputs, wire, index, merge
        self.writes = inputs.own
        self.found: Found | None = None
        self.counts: list[list[int]] = []
        self.ids: Tensor | None = None
        self.mine: Tensor | None = None
        self.values: Tensor | None = None
        self.phases = (
            Phase("counts", self.exchange_counts, early=True, on_host=True),
            Phase("ids", self.exchange_ids, early=True),
            Phase("gather", self.gather),
            Phase("values", self.exchange_values),
            Phase("merge", self.merge_values),
        )

    @property
    def most(self) -> int:
        """Rows of the rank that touched most."""
        return max(map(sum, self.counts))

    def exchange_counts(self) -> None:
        """What this rank touched, and everybody's counts by owner."""
        self.found = self.index.find()
        assert self.found is not None
        self.counts = self.wire.gather_counts(self.found.counts)

    def exchange_ids(self) -> None:
        """Everybody's numbers."""
        assert self.found is not None
        mine = self.found.rows.new_zeros(self.most).long()
        mine[: len(self.found.rows)] = self.found.rows
        self.ids = mine.new_empty(self.wire.world_size * self.most)
        self.wire.all_gather(self.ids, mine)

    def gather(self) -> None:
        """This rank's rows, out of the table."""
        assert self.found is not None
        grad = self.inputs.grad
        self.mine = grad.new_empty(self.most, grad.shape[1])
        torch.index_select(grad, 0, self.found.rows, out=self.mine[: len(self.found.rows)])

    def exchange_values(self) -> None:
        """Everybody's rows."""
        assert self.mine is not None
        self.values = self.mine.new_empty(self.wire.world_size * self.most, self.mine.shape[1])
        self.wire.all_gather(self.values, self.mine)

    def merge_values(self) -> None:
        """Those of them that are this rank's, into its slice."""
        assert self.found is not None and self.ids is not None and self.values is not None
        segments = [self._segment(source) for source in range(self.wire.world_size)]
        own_rows = self.found.rows[len(self.found.rows) - self.found.counts[self.inputs.rank] :]
        self.merge(self.inputs.own, own_rows, Received(self.ids, self.values, segments))

    def _segment(self, source: int) -> tuple[int, int]:
        """Where this rank's rows stand among those gathered from `source`: a rank's own come last in its list."""
        rank, counts = self.inputs.rank, self.counts[source]
        if source == rank:
            return (0, 0)
        before = sum(count for owner, count in enumerate(counts[:rank]) if owner != source)
        return source * self.most + before, counts[rank]

    def result(self) -> Tensor:
        self.merge.verify()
        return self.inputs.own

    def release(self) -> None:
        self.found = self.ids = self.mine = self.values = None

    def formula(self) -> list[int]:
        return traffic.sparse_all_gather(self.inputs.counts, self.inputs.row_bytes)

    def facts(self) -> dict[str, Any]:
        return {"chosen": "sparse"}

    def known_rows(self) -> Tensor | None:
        return None if self.found is None else self.found.rows
