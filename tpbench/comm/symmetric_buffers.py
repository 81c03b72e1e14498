"""Buffers that all ranks of a group map for copies from and to peers, with the signals that order these copies."""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.signals import KernelSignals, StreamSignals
from tpbench.kernels.collectives import forbid_multicast

CHANNELS = 16
"""Number of signal channels that have flags."""
ALIGNMENT = 1024
"""Alignment of each buffer's first byte, in bytes."""


class SymmetricBuffers:
    """Named pairs of symmetric buffers, the signals between ranks, and a stream for copies.

    CUDA on one node, without NVLink multicast. All ranks of the group must request the same buffers in the same order.

    The uses of a name alternate between its two buffers. No message says that a buffer is free: a rank that has
    received a peer's signal in one use knows that the peer has finished the use before, whose buffer is then free.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, signals: Literal["stream", "kernel"]) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.copies = torch.cuda.Stream(device, priority=-1)
        """Stream for copies."""
        self.memory: dict[str, tuple[Tensor, Any]] = {}
        """By name: the two buffers as one tensor of bytes, and its symmetric-memory handle."""
        self.outgrown: list[tuple[Tensor, Any]] = []
        """Replaced memory, kept because a running operation or a captured graph may hold its address."""
        self.uses: dict[str, int] = {}
        self.capturing = False
        """True if the last use was captured in a CUDA graph."""
        self.flags = self._allocated(4 * CHANNELS * self.size)
        handle = self.flags[1]
        self.captured_signals = KernelSignals(handle)
        """Signals that a CUDA graph can hold."""
        self.signals: StreamSignals | KernelSignals = (
            StreamSignals([int(pointer) for pointer in handle.buffer_ptrs], self.rank)
            if signals == "stream"
            else self.captured_signals
        )

    @property
    def gib(self) -> float:
        """Memory that this rank holds, in GiB."""
        return sum(memory.nbytes for memory, _ in (*self.memory.values(), *self.outgrown)) / 2**30

    def next(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Return the buffer for the next use of a name: by rank, a tensor in that rank's memory.

        Collective if the buffer must grow.
        """
        nbytes = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if name not in self.memory or self.memory[name][0].nbytes < 2 * nbytes:
            if name in self.memory:
                self.outgrown.append(self.memory[name])
            self.memory[name] = self._allocated(2 * nbytes)
        memory, handle = self.memory[name]
        use = self.uses.get(name, 0)
        self.uses[name] = use + 1
        offset = use % 2 * memory.nbytes // 2 // dtype.itemsize
        return [handle.get_buffer(rank, shape, dtype, offset) for rank in range(self.size)]

    def barrier(self) -> None:
        """Launch a one-block kernel that holds back the current stream until the streams of all ranks reach it.

        Later work sees what all ranks wrote before. The barrier has a channel that signals do not use.
        """
        self.flags[1].barrier(channel=CHANNELS)

    def _allocated(self, nbytes: int) -> tuple[Tensor, Any]:
        """Allocate zeroed bytes on every rank and return this rank's tensor and the handle. Collective.

        Like the memory of torch's own fused operations, it comes from no pool: a buffer begins where its handle says.
        `kernels.symmetric` needs only addresses and may use torch's pool. Here `next` cuts tensors out of the handle's
        memory, and an offset in it would point to other bytes.
        As a check each rank writes its number, and reads the number of each peer.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("shared memory must be made before a CUDA graph is captured: run a step first")
        name = enable_symmetric_memory(self.group)
        library: Any = importlib.import_module("torch._C._distributed_c10d")
        self._synchronize()  # all ranks have finished with the memory that this replaces
        mine = library._SymmetricMemory.empty_strided_p2p((nbytes,), [1], torch.uint8, self.device, name)
        handle = library._SymmetricMemory.rendezvous(mine)
        mine.fill_(self.rank)
        self._synchronize()
        last_bytes = [handle.get_buffer(peer, (nbytes,), torch.uint8)[-1:].clone() for peer in range(self.size)]
        seen = [int(byte) for byte in last_bytes]
        if seen != list(range(self.size)):
            raise RuntimeError(f"rank {self.rank} finds ranks {seen} in the memory of its peers")
        self._synchronize()
        mine.zero_()
        self._synchronize()
        return mine, handle

    def _synchronize(self) -> None:
        """Wait for all work so far of all ranks. Collective."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)


def enable_symmetric_memory(group: dist.ProcessGroup) -> str:
    """Allow symmetric memory for the group and return the group's name.

    Raises RuntimeError if the environment allows NVLink multicast.
    """
    forbid_multicast()
    library: Any = importlib.import_module("torch.distributed._symmetric_memory")
    with warnings.catch_warnings():
        # torch deprecates this call as needless; but the compiler's pass still asks whether it was made.
        warnings.simplefilter("ignore", FutureWarning)
        library.enable_symm_mem_for_group(group.group_name)
    return str(group.group_name)
