"""torch's own all-reduce of a sparse tensor, which DistributedDataParallel uses for Embedding(sparse=True)."""

from __future__ import annotations

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.exchanges.base import Phase
from tpbench.workloads.embedding_grad.exchanges.sparse import SparseExchange
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.row_operations.touched_rows import RowFinder
from tpbench.workloads.embedding_grad.traffic import formulas
from tpbench.workloads.embedding_grad.traffic.counted_collectives import CountedCollectives


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
