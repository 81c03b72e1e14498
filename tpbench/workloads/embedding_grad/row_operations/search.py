"""Search for the distinct rows of a step, on the CPU or on the device, with their numbers by owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tpbench.measure import cuda_graph
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs


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


def own_last(rows: Any, cuts: Any, rank: int) -> list[Any]:
    """Return parts of sorted rows, cut where each owner's rows begin: those of others, then those of `rank`."""
    start, stop = cuts[rank], cuts[rank + 1]
    return [rows[:start], rows[stop:], rows[start:stop]]


class CpuRowFinder:
    """Search on the CPU, without the GPU, as for hashed bigrams of the batch. The GPU gets an asynchronous copy."""

    def __init__(self, inputs: EmbeddingGradInputs, *, tokens: Tensor | None = None) -> None:
        """Search among this rank's tokens, or among `tokens`, (steps, tokens) int32."""
        tokens = inputs.own_tokens if tokens is None else tokens
        self.steps, self.rank = [step.numpy() for step in tokens], inputs.rank
        self.mask = np.zeros(inputs.problem.table_rows, dtype=np.bool_)
        """The rows touched so far, over accumulated steps."""
        self.bounds = np.array(inputs.partition.bounds)
        self.ring = PinnedRing(min(len(self.mask), tokens.numel()), inputs.device)

    def find(self) -> TouchedRows:
        for step in self.steps:
            # numpy indexes with its own integer type directly, with others through small buffers.
            self.mask[step.astype(np.intp)] = True
        rows = np.flatnonzero(self.mask)
        self.mask.fill(False)
        cuts = np.searchsorted(rows, self.bounds)
        parts = own_last(rows, cuts, self.rank)

        def fill(buffer: Tensor) -> None:
            np.concatenate(parts, out=buffer.numpy(), casting="same_kind")

        def upload() -> Tensor:
            return self.ring.upload(fill, torch.empty(len(rows), dtype=torch.int32, device=self.ring.device))

        return TouchedRows(np.diff(cuts).tolist(), upload)


class PinnedRing:
    """Two int32 buffers for copies to a device. A buffer is written again only after the copy out of it has ended.

    The host waits only if it is two steps ahead of the device.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.buffers = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self.copy_ends: list[Any] = [None, None]
        self.device = device
        self.slot = 0

    def upload(self, fill: Callable[[Tensor], object], out: Tensor) -> Tensor:
        """Let `fill` write numbers into a buffer, start their copy to `out` on the device, and return `out`."""
        slot = self.slot = 1 - self.slot
        if self.copy_ends[slot] is not None:
            self.copy_ends[slot].synchronize()
        filled = self.buffers[slot][: len(out)]
        fill(filled)
        self.copy_ends[slot] = self.copy(filled, out)
        return out

    def copy(self, filled: Tensor, out: Tensor) -> Any:
        """Start a copy on the current stream and return an event of its end."""
        out.copy_(filled, non_blocking=True)
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


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
        return TouchedRows(np.diff(cuts).tolist(), lambda: torch.cat(own_last(rows, cuts, self.rank)))


RowFinder: TypeAlias = CpuRowFinder | DeviceSearch | SortingRowFinder


def row_finder(inputs: EmbeddingGradInputs, tokens: Tensor | None = None) -> RowFinder:
    """Return the search that the problem names, for an exchange whose host needs the numbers of rows."""
    search = inputs.problem.search
    if search == "kernel" or (search == "auto" and inputs.device.type == "cuda"):
        return DeviceSearch(inputs, by_owner=True, tokens=tokens)
    return CpuRowFinder(inputs, tokens=tokens)
