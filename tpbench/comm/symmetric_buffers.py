"""Memory that all ranks of a group map, for copies from and to peers, with flags that order them."""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.signals import KernelSignals, Signals, StreamSignals
from tpbench.kernels.symmetric import forbid_multicast

CHANNELS = 16
"""For which there are flags."""
ALIGNMENT = 1024
"""Bytes: of each buffer's begin."""


class Arena:
    """Pairs of buffers by name, each use the other one of the two, and the stream of those who copy. CUDA, one node, no
    NVLink multicast.

    All ranks of the group must ask for the same buffers in the same order. Nobody says that a buffer is free: who has
    heard of a peer in one use knows that it is done with the use before, and may take that one's buffer again.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, signals: Literal["stream", "kernel"]) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.copies = torch.cuda.Stream(device, priority=-1)
        self.memory: dict[str, tuple[Tensor, Any]] = {}
        self.outgrown: list[tuple[Tensor, Any]] = []
        """Kept: an operation that is still under way, or a captured graph, may have its address."""
        self.uses: dict[str, int] = {}
        self.flags = self._allocated(4 * CHANNELS * self.size)
        self.signals: Signals = KernelSignals(self.flags[1])
        if signals == "stream":
            self.signals = StreamSignals([int(each) for each in self.flags[1].buffer_ptrs], self.rank)

    @property
    def gib(self) -> float:
        """What this rank holds."""
        return sum(memory.nbytes for memory, _ in (*self.memory.values(), *self.outgrown)) / 2**30

    def next(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """The name's buffer of the next use: by rank, a tensor in that one's memory. Collective where it must grow."""
        each = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if name not in self.memory or self.memory[name][0].nbytes < 2 * each:
            if name in self.memory:
                self.outgrown.append(self.memory[name])
            self.memory[name] = self._allocated(2 * each)
        memory, handle = self.memory[name]
        use = self.uses.get(name, 0)
        self.uses[name] = use + 1
        offset = use % 2 * memory.nbytes // 2 // dtype.itemsize
        return [handle.get_buffer(rank, shape, dtype, offset) for rank in range(self.size)]

    def barrier(self) -> None:
        """On the current stream, one kernel of one block: nothing later begins before all ranks' streams are here, and
        it sees what they wrote before. Uses a channel of its own."""
        self.flags[1].barrier(channel=CHANNELS)

    def _allocated(self, nbytes: int) -> tuple[Tensor, Any]:
        """Zeros on every rank. Allocated as for torch's own fused operations: from no pool, so that a buffer begins
        where its handle says. Checked: each rank leaves its number, and reads each peer's."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("shared memory must be made before a CUDA graph is captured: run a step first")
        name = enabled(self.group)
        library: Any = importlib.import_module("torch._C._distributed_c10d")
        self._meet()  # nobody is still at what this replaces
        mine = library._SymmetricMemory.empty_strided_p2p((nbytes,), [1], torch.uint8, self.device, name)
        handle = library._SymmetricMemory.rendezvous(mine)
        mine.fill_(self.rank)
        self._meet()
        last = [handle.get_buffer(peer, (nbytes,), torch.uint8)[-1:].clone() for peer in range(self.size)]
        seen = [int(each) for each in last]
        if seen != list(range(self.size)):
            raise RuntimeError(f"rank {self.rank} finds ranks {seen} in the memory of its peers")
        self._meet()
        mine.zero_()
        self._meet()
        return mine, handle

    def _meet(self) -> None:
        """All work of all ranks so far is done."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)


def enabled(group: dist.ProcessGroup) -> str:
    """The group's name, once torch has been told that it may use symmetric memory."""
    forbid_multicast()
    library: Any = importlib.import_module("torch.distributed._symmetric_memory")
    with warnings.catch_warnings():
        # Deprecated as needless; but the compiler's pass still asks whether it was called.
        warnings.simplefilter("ignore", FutureWarning)
        library.enable_symm_mem_for_group(group.group_name)
    return str(group.group_name)
