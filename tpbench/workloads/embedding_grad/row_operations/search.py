"""Search for the distinct rows of a step, on the CPU or on the device, with their numbers by owner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpbench.measure import cuda_graph
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.problem import SEARCH_BY_DEVICE, EmbeddingGrad


class MisplacedRow(RuntimeError):
    """Error: a rank has or was sent a row of the wrong owner, or outside the table."""


@dataclass
class TouchedRows:
    """A rank's distinct touched rows in one step."""

    counts: list[int]
    """Number of these rows that each rank owns."""
    upload: Callable[[], Tensor]
    """Function that copies the row numbers to the device. A dense exchange does not need that copy."""

    @cached_property
    def rows(self) -> Tensor:
        """(touched,) int32 on the device: by owner, ascending, but this rank's own rows after those of all others."""
        return self.upload()


class RowFinder(Protocol):
    """Search for the touched rows of each step."""

    def find(self) -> TouchedRows:
        """Return the rows of this step."""


class CpuRowFinder:
    """Search on the CPU, without the GPU, as for hashed bigrams of the batch. The GPU gets an asynchronous copy."""

    def __init__(self, inputs: EmbeddingGradInputs, *, pinned: bool, tokens: Tensor | None = None) -> None:
        """Search among this rank's tokens, or among `tokens`, (steps, tokens) int32."""
        tokens = inputs.own_tokens if tokens is None else tokens
        self.steps, self.rank = [step.numpy() for step in tokens], inputs.rank
        self.mask = np.zeros(inputs.problem.table_rows, dtype=np.bool_)
        """The rows touched so far, over accumulated steps."""
        self.bounds = np.array(inputs.partition.bounds)
        pinned = pinned and inputs.device.type == "cuda"
        self.ring = PinnedRing(min(len(self.mask), tokens.numel()), inputs.device, pinned=pinned)

    def find(self) -> TouchedRows:
        for step in self.steps:
            # numpy checks the upper bound, but counts negative numbers from the end.
            if len(step) and step.min() < 0:
                raise IndexError(f"row {step.min()} is not in the table")
            # numpy indexes with its own integer type directly, with others through small buffers.
            self.mask[step.astype(np.intp)] = True
        rows = np.flatnonzero(self.mask)
        self.mask.fill(False)
        cuts = np.searchsorted(rows, self.bounds)
        start, stop = cuts[self.rank], cuts[self.rank + 1]
        parts = [rows[:start], rows[stop:], rows[start:stop]]
        return TouchedRows(np.diff(cuts).tolist(), lambda: self.ring.upload(parts))


class PinnedRing:
    """Two int32 buffers for copies to a device. A buffer is written again only after the copy out of it has ended.

    The host waits only if it is two steps ahead of the device, or for each copy from memory that is not pinned.
    """

    def __init__(self, capacity: int, device: torch.device, *, pinned: bool) -> None:
        self.buffers = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self.copy_ends: list[Any] = [None, None]
        self.device, self.pinned = device, pinned
        self.slot = 0

    def upload(self, parts: Sequence[NDArray[np.integer[Any]]]) -> Tensor:
        """Return the concatenated `parts` as an int32 tensor on the device, whose copy may still be running."""
        slot = self.slot = 1 - self.slot
        if self.copy_ends[slot] is not None:
            self.copy_ends[slot].synchronize()
        filled = self.buffers[slot][: sum(map(len, parts))]
        np.concatenate(parts, out=filled.numpy(), casting="same_kind")
        uploaded, self.copy_ends[slot] = self.copy(filled)
        return uploaded

    def copy(self, filled: Tensor) -> tuple[Tensor, Any]:
        """Start a copy to the device on the current stream. Return the tensor there and an event of the copy's end."""
        uploaded = filled.to(self.device, non_blocking=self.pinned, copy=True)
        on_gpu = self.device.type == "cuda"
        return uploaded, torch.cuda.current_stream(self.device).record_event() if on_gpu else None


class Replayed:
    """Calls `work` the first time, captures it the second time, and from then on queues replays.

    A replay costs the host about as much as one launch. `work` must only launch kernels on the current stream, and must
    allocate nothing. On a CPU, and while another graph is captured, each call is a call of `work`.
    """

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self.work, self.device = work, device
        self.compiled = False
        self.replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Run the work; on a GPU queue it on the current stream."""
        if self.device.type == "cpu" or torch.cuda.is_current_stream_capturing() or not self.compiled:
            self.work()
            self.compiled = True
            return
        if self.replay is None:
            self.replay = cuda_graph.capture(self.work).replay
        self.replay()


class DeviceSearch:
    """Lists of a step's distinct rows, split by owner or in one list. The host only queues the search.

    A captured CUDA graph may hold the addresses of all tensors here: none is ever replaced.
    """

    def __init__(self, inputs: EmbeddingGradInputs, *, by_owner: bool, tokens: Tensor | None = None) -> None:
        """Search among this rank's tokens, or among `tokens`, int32 rows of the table in any shape."""
        partition, device, self.rank = inputs.partition, inputs.device, inputs.rank
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
        from tpbench.workloads.embedding_grad.row_operations import row_kernels

        self.epoch.add_(1)
        self.counts.zero_()
        row_kernels.list_rows(
            self.tokens,
            self.stamps,
            self.epoch,
            self.lists,
            self.counts,
            rows_per_list=self.rows_per_list,
            misplaced=self.misplaced,
        )

    def find(self) -> TouchedRows:
        """Search by owner. The host waits for the numbers of rows."""
        self.run()
        counts: list[int] = self.counts.tolist()

        def rows() -> Tensor:
            lists = [rows[:count] for rows, count in zip(self.lists, counts, strict=True)]
            return torch.cat([*lists[: self.rank], *lists[self.rank + 1 :], lists[self.rank]])

        return TouchedRows(counts, rows)

    def verify(self) -> None:
        """Raise MisplacedRow if a token's row is not in the table."""
        if misplaced := int(self.misplaced):
            raise MisplacedRow(f"{misplaced} tokens have rows that are not of the table")


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


def row_finder(inputs: EmbeddingGradInputs, tokens: Tensor | None = None) -> RowFinder:
    """Return the search that the problem names, for an exchange whose host needs the numbers of rows."""
    if searches_on_device(inputs.problem, inputs.device):
        return DeviceSearch(inputs, by_owner=True, tokens=tokens)
    return CpuRowFinder(inputs, pinned=inputs.problem.pinned, tokens=tokens)
