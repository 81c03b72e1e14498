"""Search for the distinct rows of a step, on the CPU or on the device, with their numbers by owner."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpbench.measure import cuda_graph
from tpbench.workloads.embedding_grad.exchanges import row_kernels
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs


class CpuRowFinder:
    """Search on the CPU, without the GPU, as for hashed bigrams of the batch. The GPU gets an asynchronous copy."""

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        self.steps, self.rank = [step.numpy() for step in inputs.own_tokens], inputs.rank
        self.mask = np.zeros(inputs.problem.table_rows, dtype=np.bool_)
        """The rows touched so far, over accumulated steps."""
        self.bounds = np.array(inputs.bounds)
        self.ring = PinnedRing(min(len(self.mask), inputs.own_tokens.numel()), inputs.device)

    def find(self) -> list[int]:
        """Search, and return the number of touched rows that each rank owns."""
        for step in self.steps:
            # numpy indexes with its own integer type directly, with others through small buffers.
            self.mask[step.astype(np.intp)] = True
        self.found = np.flatnonzero(self.mask)
        self.mask.fill(False)
        self.cuts = np.searchsorted(self.found, self.bounds)
        return [int(count) for count in np.diff(self.cuts)]

    def rows(self) -> Tensor:
        """Return (touched,) int32 on the device: by owner, but this rank's own rows after those of all others."""
        start, stop = self.cuts[self.rank], self.cuts[self.rank + 1]
        parts = self.found[:start], self.found[stop:], self.found[start:stop]
        out = torch.empty(len(self.found), dtype=torch.int32, device=self.ring.device)
        return self.ring.upload(lambda buffer: np.concatenate(parts, out=buffer.numpy(), casting="same_kind"), out)


class PinnedRing:
    """Two int32 buffers for copies to a device. The host waits only if it is two steps ahead of the device."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.buffers = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self.copy_ends: list[Any] = [None, None]
        self.device, self.slot = device, 0

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
    """Lists of a step's distinct rows, by owner or one. CUDA graphs may hold these tensors: none is ever replaced."""

    def __init__(self, inputs: EmbeddingGradInputs, *, by_owner: bool) -> None:
        device, self.rank, table_rows = inputs.device, inputs.rank, inputs.bounds[-1]
        self.tokens = inputs.own_tokens.to(device)
        owners = inputs.world_size if by_owner else 1
        self.rows_per_list = table_rows // owners

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.epoch, self.misplaced = zeros(1), zeros(1)
        self.stamps, self.counts = zeros(table_rows), zeros(owners)
        self.lists = zeros(owners, min(self.tokens.numel(), self.rows_per_list))
        self.run = Replayed(self._search, device)
        """Function that queues the search. It increases `epoch` by 1, and fills `lists` and `counts`."""

    def _search(self) -> None:
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

    def find(self) -> list[int]:
        """Search by owner, and return the number of touched rows that each rank owns. The host waits for it."""
        self.run()
        self.found: list[int] = self.counts.tolist()
        return self.found

    def rows(self) -> Tensor:
        """Return the rows as `CpuRowFinder.rows` does, but those of one owner in any order."""
        lists = [rows[:count] for rows, count in zip(self.lists, self.found, strict=True)]
        return torch.cat([*lists[: self.rank], *lists[self.rank + 1 :], lists[self.rank]])


def row_finder(inputs: EmbeddingGradInputs) -> CpuRowFinder | DeviceSearch:
    """Return the search that the problem names, for an exchange whose host needs the numbers of rows."""
    search = inputs.problem.search
    if search == "kernel" or (search == "auto" and inputs.device.type == "cuda"):
        return DeviceSearch(inputs, by_owner=True)
    return CpuRowFinder(inputs)
