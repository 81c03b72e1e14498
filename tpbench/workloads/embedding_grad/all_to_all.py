"""The sparse reduce-scatter: each touched row goes to its owner, which merges it into its slice."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from tpbench.workloads.embedding_grad import traffic
from tpbench.workloads.embedding_grad.exchange import Phase
from tpbench.workloads.embedding_grad.index import Found, Index
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.merge import Merge, Received
from tpbench.workloads.embedding_grad.wire import Wire


class SparseAllToAll:
    """Counts, numbers and values in an all-to-all each. A rank's own rows stay where they are."""

    def __init__(self, inputs: Inputs, wire: Wire, index: Index, merge: Merge) -> None:
        self.inputs, self.wire, self.index, self.merge = inputs, wire, index, merge
        self.writes = inputs.own
        self.found: Found | None = None
        self.sent: list[int] = []
        self.received: list[int] = []
        self.ids: Tensor | None = None
        self.leaving_values: Tensor | None = None
        self.values: Tensor | None = None
        self.phases = (
            Phase("counts", self.exchange_counts, early=True, on_host=True),
            Phase("ids", self.exchange_ids, early=True),
            Phase("gather", self.gather),
            Phase("values", self.exchange_values),
            Phase("merge", self.merge_values),
        )

    def exchange_counts(self) -> None:
        """What this rank touched, and how many rows come from whom."""
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
        """The numbers of the rows that come."""
        leaving = self._leaving
        self.ids = leaving.new_empty(sum(self.received))
        self.wire.all_to_all(self.ids, leaving, self.received, self.sent)

    def gather(self) -> None:
        """The rows that go, out of the table."""
        self.leaving_values = self.inputs.grad.index_select(0, self._leaving)

    def exchange_values(self) -> None:
        """The rows themselves."""
        assert self.leaving_values is not None
        self.values = self.leaving_values.new_empty(sum(self.received), self.inputs.grad.shape[1])
        self.wire.all_to_all(self.values, self.leaving_values, self.received, self.sent)

    def merge_values(self) -> None:
        """Into this rank's slice."""
        assert self.found is not None and self.ids is not None and self.values is not None
        starts = itertools.accumulate(self.received, initial=0)
        segments = list(zip(starts, self.received, strict=False))
        own_rows = self.found.rows[sum(self.sent) :]
        self.merge(self.inputs.own, own_rows, Received(self.ids, self.values, segments))

    @property
    def _leaving(self) -> Tensor:
        assert self.found is not None
        return self.found.rows[: sum(self.sent)]

    def result(self) -> Tensor:
        self.merge.verify()
        return self.inputs.own

    def release(self) -> None:
        self.found = self.ids = self.leaving_values = self.values = None

    def formula(self) -> list[int]:
        return traffic.sparse_all_to_all(self.inputs.counts, self.inputs.row_bytes)

    def facts(self) -> dict[str, Any]:
        return {"chosen": "sparse"}

    def known_rows(self) -> Tensor | None:
        return None if self.found is None else self.found.rows


def _without(counts: list[int], rank: int) -> list[int]:
    """The counts with none for this rank."""
    return [0 if owner == rank else count for owner, count in enumerate(counts)]
