"""The sparse reduce-scatter: each touched row goes to its owner, which merges it into its slice."""

from __future__ import annotations

import itertools

from torch import Tensor

from tpbench.workloads.embedding_grad import traffic
from tpbench.workloads.embedding_grad.index import Found
from tpbench.workloads.embedding_grad.sparse import MergingExchange, gather


class SparseAllToAll(MergingExchange):
    """Counts, numbers and values in an all-to-all each. A rank's own rows stay where they are."""

    sent: list[int]
    """Rows that go to each rank."""
    received: list[int]
    """Rows that come from each rank."""

    def exchange_counts(self) -> None:
        found = self.index.find()
        if found is None:
            raise RuntimeError(
                "the touched rows are not known: only a dense exchange, or sparse_auto, can do this step"
            )
        sent = _without(found.counts, self.inputs.rank)
        self.begin(found, self.wire.exchange_counts(sent))

    def begin(self, found: Found, received: list[int]) -> None:
        """The counts are known: from here on the exchange is the device's."""
        self.found, self.received = found, received
        self.sent = _without(found.counts, self.inputs.rank)

    def exchange_ids(self) -> None:
        leaving = self._leaving
        self.ids = leaving.new_empty(sum(self.received))
        self.wire.all_to_all(self.ids, leaving, self.received, self.sent)

    def gather(self) -> None:
        grad, leaving = self.inputs.grad, self._leaving
        self.mine = grad.new_empty(len(leaving), grad.shape[1])
        gather(grad, leaving, self.mine)

    def exchange_values(self) -> None:
        assert self.mine is not None
        self.values = self.mine.new_empty(sum(self.received), self.inputs.grad.shape[1])
        self.wire.all_to_all(self.values, self.mine, self.received, self.sent)

    def segments(self) -> list[tuple[int, int]]:
        starts = itertools.accumulate(self.received, initial=0)
        return list(zip(starts, self.received, strict=False))

    @property
    def _leaving(self) -> Tensor:
        assert self.found is not None
        return self.found.rows[: sum(self.sent)]

    def formula(self) -> list[int]:
        return traffic.sparse_all_to_all(self.inputs.counts, self.inputs.row_bytes)


def _without(counts: list[int], rank: int) -> list[int]:
    """The counts with none for this rank."""
    return [0 if owner == rank else count for owner, count in enumerate(counts)]
