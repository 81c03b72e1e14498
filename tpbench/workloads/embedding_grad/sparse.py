"""What the sparse exchanges share: the rows that were found, and the slice that those received are merged into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.exchange import Phase
from tpbench.workloads.embedding_grad.index import Found, Index
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.merge import Merge
from tpbench.workloads.embedding_grad.wire import Wire


class SparseExchange:
    """An exchange of the rows that the index finds; it ends in this rank's slice of the gradient."""

    def __init__(self, inputs: Inputs, wire: Wire, index: Index) -> None:
        self.inputs, self.wire, self.index = inputs, wire, index
        self.writes = inputs.own
        self.found: Found | None = None

    def result(self) -> Tensor:
        return self.inputs.own

    def facts(self) -> dict[str, Any]:
        return {"chosen": "sparse"}

    def known_rows(self) -> Tensor | None:
        return None if self.found is None else self.found.rows


def gather(table: Tensor, rows: Tensor, output: Tensor) -> None:
    """`output[i] = table[rows[i]]`."""
    if not table.is_cuda:
        torch.index_select(table, 0, rows, out=output)
        return
    from tpbench.workloads.embedding_grad.gather_kernel import gather_rows

    gather_rows(table, rows, output)


class MergingExchange(SparseExchange, ABC):
    """One that receives numbers (`ids`) and values of rows, in a segment for each rank, and merges them itself."""

    def __init__(self, inputs: Inputs, wire: Wire, index: Index, merge: Merge) -> None:
        super().__init__(inputs, wire, index)
        self.merge = merge
        self.ids: Tensor | None = None
        self.mine: Tensor | None = None
        self.values: Tensor | None = None
        self.phases = (
            Phase("counts", self.exchange_counts, after="batch", on_host=True),
            Phase("ids", self.place, after="forward"),
            Phase("gather", self.gather),
            Phase("values", self.exchange_values),
            Phase("merge", self.merge_values),
        )

    @abstractmethod
    def exchange_counts(self) -> None:
        """What this rank touched, and how many rows come from whom."""

    @abstractmethod
    def exchange_ids(self) -> None:
        """The numbers of the rows that come."""

    @abstractmethod
    def gather(self) -> None:
        """The rows that go, out of the table."""

    @abstractmethod
    def exchange_values(self) -> None:
        """The rows themselves."""

    @abstractmethod
    def segments(self) -> list[tuple[int, int]]:
        """By source rank, where the rows for this one begin among those received, and how many they are."""

    def place(self) -> None:
        """Their numbers and those of its own (the last it found), where the merge will look."""
        self.exchange_ids()
        assert self.found is not None and self.ids is not None
        own_rows = self.found.rows[len(self.found.rows) - self.found.counts[self.inputs.rank] :]
        self.merge.place(own_rows, self.ids, self.segments())

    def merge_values(self) -> None:
        """Those that are this rank's into its slice."""
        assert self.values is not None
        self.merge(self.inputs.own, self.values)

    def result(self) -> Tensor:
        self.merge.verify()
        return self.inputs.own

    def release(self) -> None:
        self.found = self.ids = self.mine = self.values = None
        self.merge.release()
