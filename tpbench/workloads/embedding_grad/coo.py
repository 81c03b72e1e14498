"""torch's own all-reduce of a sparse tensor, as DistributedDataParallel uses for Embedding(sparse=True)."""

from __future__ import annotations

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad import traffic
from tpbench.workloads.embedding_grad.exchange import Phase
from tpbench.workloads.embedding_grad.index import Index
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.sparse import SparseExchange
from tpbench.workloads.embedding_grad.wire import Wire


class TorchSparseAllReduce(SparseExchange):
    """Everybody gets everybody's rows, coalesced in the gradient's dtype."""

    def __init__(self, inputs: Inputs, wire: Wire, index: Index) -> None:
        super().__init__(inputs, wire, index)
        self.mine: Tensor | None = None
        self.total: Tensor | None = None
        self.phases = (
            Phase("counts", self.find, after="batch", on_host=True),
            Phase("gather", self.gather),
            Phase("values", self.all_reduce),
            Phase("merge", self.take_own),
        )

    def find(self) -> None:
        """What this rank touched; nothing is exchanged."""
        self.found = self.index.find()

    def gather(self) -> None:
        """This rank's rows as a COO tensor of the whole table."""
        assert self.found is not None
        rows = self.found.rows.sort().values.long()
        values = self.inputs.grad.index_select(0, rows)
        self.mine = torch.sparse_coo_tensor(
            rows[None], values, tuple(self.inputs.grad.shape), is_coalesced=True, check_invariants=False
        )

    def all_reduce(self) -> None:
        """The sum over ranks."""
        assert self.mine is not None
        self.total = self.wire.sparse_all_reduce(self.mine.clone())

    def take_own(self) -> None:
        """The mean of this rank's rows, into its slice."""
        assert self.total is not None
        owners, rank = self.inputs.owners, self.inputs.rank
        rows = self.total.indices()[0]
        bounds = torch.tensor(owners.bounds[rank : rank + 2], device=rows.device)
        start, stop = torch.searchsorted(rows, bounds).tolist()
        values = self.total.values()[start:stop] * (1.0 / owners.world_size)
        self.inputs.own[rows[start:stop] - owners.first(rank)] = values

    def release(self) -> None:
        self.found = self.mine = self.total = None

    def formula(self) -> list[int]:
        return traffic.sparse_all_reduce(self.inputs.counts, self.inputs.row_bytes)
