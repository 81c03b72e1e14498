"""Search for the distinct rows of a step, on the CPU or on the device, with their numbers by owner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.problem import SEARCH_BY_DEVICE, EmbeddingGrad
from tpbench.workloads.embedding_grad.row_operations.merge import MisplacedRow
from tpbench.workloads.embedding_grad.tokens import RowPartition


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

    def find(self) -> TouchedRows | None:
        """Return the rows of this step, or None if they are not known."""


class TouchedMask:
    """Mask, on the CPU, of the rows touched since the last `take`, over accumulated steps."""

    def __init__(self, table_rows: int) -> None:
        self.mask = np.zeros(table_rows, dtype=np.bool_)

    def add(self, rows: NDArray[np.int32]) -> None:
        """Mark the rows of one step's tokens, which may be in any order and repeat. Raise IndexError outside."""
        if len(rows) and rows.min() < 0:  # numpy checks the upper bound, but counts negative numbers from the end
            raise IndexError(f"row {rows.min()} is not in the table")
        # numpy indexes with its own integer type directly, with others through small buffers.
        self.mask[rows.astype(np.intp)] = True

    def take(self) -> NDArray[np.intp]:
        """Return the marked rows, distinct and sorted, and clear the mask."""
        rows = np.flatnonzero(self.mask)
        self.mask.fill(False)
        return rows


class CpuRowFinder:
    """Search on the CPU, without the GPU, as for hashed bigrams of the batch. The GPU gets an asynchronous copy."""

    def __init__(self, inputs: EmbeddingGradInputs, *, pinned: bool) -> None:
        self.inputs, self.mask = inputs, TouchedMask(inputs.problem.table_rows)
        self.steps = [step.numpy() for step in inputs.own_tokens]
        self.bounds = np.array(inputs.partition.bounds)
        capacity = min(inputs.problem.table_rows, inputs.own_tokens.numel())
        on_gpu = inputs.device.type == "cuda"
        self.ring = PinnedRing(capacity, cuda_copy(inputs.device), pinned=True) if on_gpu and pinned else None

    def find(self) -> TouchedRows:
        for step in self.steps:
            self.mask.add(step)
        rows = self.mask.take()
        cuts = np.searchsorted(rows, self.bounds)
        parts = own_last(rows, cuts, self.inputs.rank)
        ring, device = self.ring, self.inputs.device
        # The host waits for a copy from pageable memory.
        upload = lambda: to_int32(parts).to(device) if ring is None else ring.upload(parts)  # noqa: E731
        return TouchedRows(np.diff(cuts).tolist(), upload)


def own_last(rows: NDArray[np.intp], cuts: NDArray[np.intp], rank: int) -> list[NDArray[np.intp]]:
    """Split sorted rows into those of owners before this rank, those of owners after it, and this rank's own."""
    start, stop = cuts[rank], cuts[rank + 1]
    return [rows[:start], rows[stop:], rows[start:stop]]


def to_int32(parts: list[NDArray[np.intp]]) -> Tensor:
    """Concatenate row numbers into an int32 tensor."""
    return torch.from_numpy(np.concatenate(parts, dtype=np.int32, casting="same_kind"))


class EvenlySpacedRows:
    """A given number of evenly spaced rows, for calibration. Each `find` copies them to the device, as a step does."""

    def __init__(self, partition: RowPartition, rank: int, device: torch.device, rows: int) -> None:
        spaced = np.arange(rows, dtype=np.intp) * partition.table_rows // rows
        cuts = np.searchsorted(spaced, np.array(partition.bounds))
        self.counts = np.diff(cuts).tolist()
        numbers = to_int32(own_last(spaced, cuts, rank))
        self.numbers = numbers.pin_memory() if device.type == "cuda" else numbers
        self.device = device

    def find(self) -> TouchedRows:
        return TouchedRows(self.counts, lambda: self.numbers.to(self.device, non_blocking=True, copy=True))


Copy = Callable[[Tensor], tuple[Tensor, Any]]
"""Function that starts a copy to the device. It returns the tensor there and a torch.cuda.Event of the copy's end."""


class PinnedRing:
    """Ring of pinned int32 buffers. A buffer is written again only after the copy out of it has ended.

    With two slots the host waits only if it is two steps ahead of the device.
    """

    def __init__(self, capacity: int, copy: Copy, *, pinned: bool, slots: int = 2) -> None:
        self.buffers = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(slots)]
        self.copy_ends: list[Any] = [None] * slots
        self.copy = copy
        self.slot = 0

    def upload(self, parts: Sequence[NDArray[np.integer[Any]]]) -> Tensor:
        """Return the concatenated `parts` as an int32 tensor on the device, whose copy may still be running."""
        slot = self.slot = (self.slot + 1) % len(self.buffers)
        copy_end = self.copy_ends[slot]
        if copy_end is not None:
            copy_end.synchronize()
        filled = self.buffers[slot][: sum(map(len, parts))]
        np.concatenate(parts, out=filled.numpy(), casting="same_kind")
        uploaded, self.copy_ends[slot] = self.copy(filled)
        return uploaded


def cuda_copy(device: torch.device) -> Copy:
    """Return a `Copy` that copies on the current stream."""

    def copy(filled: Tensor) -> tuple[Tensor, Any]:
        uploaded = filled.to(device, non_blocking=True)
        end = torch.cuda.Event()
        end.record()
        return uploaded, end

    return copy


class Replayed:
    """Calls `work` the first time, captures it the second time, and from then on queues replays.

    A replay costs the host about as much as one launch. `work` must only launch kernels on the current stream, and must
    allocate nothing. On a CPU, and while another graph is captured, each call is a call of `work`.
    """

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self.work, self.device = work, device
        self.compiled = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run the work; on a GPU queue it on the current stream."""
        if self.device.type == "cpu" or torch.cuda.is_current_stream_capturing() or not self.compiled:
            self.work()
            self.compiled = True
            return
        if self.graph is None:
            self.graph = self._captured()
        self.graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            # Threads of other libraries may call CUDA at the same time.
            graph.capture_begin(capture_error_mode="thread_local")
            self.work()
            graph.capture_end()
        return graph


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
