"""Buffers that all ranks of a group map for copies from and to peers, with the signals that order these copies.

A rank learns from a signal that a peer's copy has arrived. A wait on a channel takes the peer's signals in the order in
which the peer sent them. Sending and waiting act on the current stream and return to the host at once. The CUDA driver
has calls for this that torch does not offer.
"""

import ctypes
import importlib
import math
import warnings
from collections import Counter
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels.distributed import forbid_multicast

GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: cyclic comparison of 32 bits
WITH_BARRIER = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: earlier writes of the stream become visible first
CHANNELS = 16
"""Number of signal channels that have flags."""
ALIGNMENT = 1024
"""Alignment of each buffer's first byte, in bytes."""


@cache
def cuda_driver() -> Any:
    """Load the CUDA driver's library. Raise OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *arguments: Any) -> None:
    """Call a driver function with ctypes arguments. Raise RuntimeError if it returns an error code."""
    if error := getattr(cuda_driver(), name)(*arguments):
        raise RuntimeError(f"{name} failed with CUDA error {error}")


def current_stream() -> ctypes.c_void_p:
    """Return torch's current stream as an argument for `call_driver`."""
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


class StreamSignals:
    """Signals by memory operations of the stream itself (cuStreamWriteValue32, cuStreamWaitValue32).

    They need no SM, so that a product that fills the GPU does not delay them. Flags count up. A captured graph would
    wait for numbers that have passed, therefore both methods raise RuntimeError during capture.
    """

    def __init__(self, addresses: list[int], rank: int) -> None:
        """Use the zeroed flags of each rank; `addresses[rank]` is where that rank's flags are mapped here."""
        self.addresses, self.rank = addresses, rank
        self.calls: Counter[tuple[str, int]] = Counter()

    def put_signal(self, peer: int, channel: int) -> None:
        """Signal a peer after all earlier work of the current stream."""
        self._call("cuStreamWriteValue32_v2", self._flag(peer, channel, self.rank), WITH_BARRIER)

    def wait_signal(self, peer: int, channel: int) -> None:
        """Hold back later work of the current stream until the peer's next signal."""
        self._call("cuStreamWaitValue32_v2", self._flag(self.rank, channel, peer), GREATER_OR_EQUAL)

    def _flag(self, holder: int, channel: int, sender: int) -> int:
        """Return the address of the flag for a channel and a sender, among those of the rank that holds it."""
        return self.addresses[holder] + 4 * (channel * len(self.addresses) + sender)

    def _call(self, name: str, address: int, flags: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("signals=stream cannot be captured in a CUDA graph: graph=false or signals=kernel")
        self.calls[name, address] += 1
        value = ctypes.c_uint32(self.calls[name, address] & 0xFFFFFFFF)
        call_driver(name, current_stream(), ctypes.c_uint64(address), value, ctypes.c_uint(flags))


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
        self.uses: Counter[str] = Counter()
        self.capturing = False
        """True if the last use was captured in a CUDA graph."""
        self.flags = self._allocated(4 * CHANNELS * self.size)
        self.captured_signals: Any = self.flags[1]
        """Signals that a CUDA graph can hold: the handle's put_signal and wait_signal, which are kernels of one block.
        They wait for a free SM. A signal is sent only after the receiver has waited for the last one on the same
        channel, because that wait resets the flag."""
        addresses = [int(pointer) for pointer in self.captured_signals.buffer_ptrs]
        self.signals = StreamSignals(addresses, self.rank) if signals == "stream" else self.captured_signals

    @property
    def gib(self) -> float:
        """Memory that this rank holds, in GiB."""
        return sum(memory.nbytes for memory, _ in (*self.memory.values(), *self.outgrown)) / 2**30

    def next(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Return the buffer for the next use of a name: by rank, a tensor in that rank's memory.

        Collective if the buffer must grow.
        """
        nbytes = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if name in self.memory and self.memory[name][0].nbytes < 2 * nbytes:
            self.outgrown.append(self.memory.pop(name))
        if name not in self.memory:
            self.memory[name] = self._allocated(2 * nbytes)
        memory, handle = self.memory[name]
        offset = self.uses[name] % 2 * memory.nbytes // 2 // dtype.itemsize
        self.uses[name] += 1
        return [handle.get_buffer(rank, shape, dtype, offset) for rank in range(self.size)]

    def barrier(self) -> None:
        """Launch a one-block kernel that holds back the current stream until the streams of all ranks reach it.

        Later work sees what all ranks wrote before. The barrier has a channel that signals do not use.
        """
        self.flags[1].barrier(channel=CHANNELS)

    def _allocated(self, nbytes: int) -> tuple[Tensor, Any]:
        """Allocate zeroed bytes on every rank and return this rank's tensor and the handle. Collective.

        It comes from no pool, unlike that of `kernels.symmetric`: `next` cuts tensors out of the handle's memory, which
        begins elsewhere than a tensor of torch's pool.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("shared memory must be made before a CUDA graph is captured: run a step first")
        name = enable_symmetric_memory(self.group)
        library: Any = importlib.import_module("torch._C._distributed_c10d")
        self._synchronize()  # all ranks have finished with the memory that this replaces
        mine = library._SymmetricMemory.empty_strided_p2p((nbytes,), [1], torch.uint8, self.device, name)
        handle = library._SymmetricMemory.rendezvous(mine, name)
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
