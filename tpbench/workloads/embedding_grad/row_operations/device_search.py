"""Search for the touched rows on the device: by a kernel that lists them, or by sorting."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.problem import SEARCH_BY_DEVICE, EmbeddingGrad
from tpbench.workloads.embedding_grad.row_operations.merge import MisplacedRow
from tpbench.workloads.embedding_grad.row_operations.replayed import Replayed
from tpbench.workloads.embedding_grad.row_operations.touched_rows import CpuRowFinder, TouchedRows


class DeviceSearch:
    """Lists of a step's distinct rows, split by owner or in one list. The host only queues the search.

    A captured CUDA graph may hold the addresses of all tensors here: none is ever replaced.
    """

    def __init__(self, inputs: EmbeddingGradInputs, *, by_owner: bool, tokens: Tensor | None = None) -> None:
        """Search among this rank's tokens, or among `tokens`, int32 rows of the table in any shape."""
        partition, device = inputs.partition, inputs.device
        self.tokens = (inputs.own_tokens if tokens is None else tokens).to(device).contiguous()
        owners = partition.world_size if by_owner else 1
        self.rows_per_list = partition.padded_rows // owners

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.epoch, self.misplaced = zeros(1), zeros(1)
        self.stamps, self.counts = zeros(partition.padded_rows), zeros(owners)
        self.lists = zeros(owners, min(self.tokens.numel(), self.rows_per_list))
        self.run = Replayed(self._search, device)
        """Function that queues the search. It increases `epoch` by 1, and fills `lists` and `counts`."""

    def _search(self) -> None:
        from tpbench.workloads.embedding_grad.row_operations.search_kernel import list_rows

        self.epoch.add_(1)
        self.counts.zero_()
        list_rows(
            self.tokens,
            self.stamps,
            self.epoch,
            self.lists,
            self.counts,
            rows_per_list=self.rows_per_list,
            misplaced=self.misplaced,
        )

    def verify(self) -> None:
        """Raise MisplacedRow if a token's row is not in the table."""
        if misplaced := int(self.misplaced):
            raise MisplacedRow(f"{misplaced} tokens have rows that are not of the table")


class KernelRowFinder:
    """Search on the device by the kernel. The host waits for the numbers of rows, one for each owner."""

    def __init__(self, inputs: EmbeddingGradInputs, tokens: Tensor | None = None) -> None:
        self.rank, self.search = inputs.rank, DeviceSearch(inputs, by_owner=True, tokens=tokens)

    def find(self) -> TouchedRows:
        self.search.run()
        counts: list[int] = self.search.counts.tolist()
        return TouchedRows(counts, partial(self._own_last, counts))

    def _own_last(self, counts: list[int]) -> Tensor:
        lists = [rows[:count] for rows, count in zip(self.search.lists, counts, strict=True)]
        return torch.cat([*lists[: self.rank], *lists[self.rank + 1 :], lists[self.rank]])


class SortingRowFinder:
    """Search on the device by torch.unique. The host waits for the number of rows and for their counts."""

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        self.rank = inputs.rank
        self.tokens = inputs.own_tokens.to(inputs.device)
        self.bounds = torch.tensor(inputs.partition.bounds, dtype=torch.int32, device=inputs.device)

    def find(self) -> TouchedRows:
        rows = torch.unique(self.tokens)
        cuts = torch.searchsorted(rows, self.bounds).tolist()
        start, stop = cuts[self.rank], cuts[self.rank + 1]
        counts = [after - before for before, after in itertools.pairwise(cuts)]
        return TouchedRows(counts, lambda: torch.cat([rows[:start], rows[stop:], rows[start:stop]]))


def searches_on_device(problem: EmbeddingGrad, device: torch.device) -> bool:
    """Return true if an exchange that can search on the host or on the device searches on the device."""
    return (SEARCH_BY_DEVICE[device.type] if problem.search == "auto" else problem.search) == "kernel"


def row_finder(problem: EmbeddingGrad, inputs: EmbeddingGradInputs) -> CpuRowFinder | KernelRowFinder:
    """Return the search that the problem names, for an exchange whose host needs the numbers of rows."""
    if searches_on_device(problem, inputs.device):
        return KernelRowFinder(inputs)
    return CpuRowFinder(inputs, pinned=problem.pinned)
