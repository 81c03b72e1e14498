"""Signals between ranks in stream order: a rank learns from them that a peer's copy has arrived.

A wait on a channel takes the peer's signals in the order in which the peer sent them. Sending and waiting act on the
current stream and return to the host at once. The CUDA driver has calls for this that torch does not offer.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from functools import cache
from typing import Any

import torch

GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: cyclic comparison of 32 bits
WITH_BARRIER = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: earlier writes of the stream become visible first


@cache
def cuda_driver() -> Any:
    """Load the CUDA driver's library. Raise OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


def driver_has(name: str) -> bool:
    """Return true if the installed driver has a function of this name: older drivers lack some."""
    return getattr(cuda_driver(), name, None) is not None


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
    wait for numbers that have passed, therefore `send` and `wait` raise RuntimeError during capture.
    """

    def __init__(self, addresses: list[int], rank: int) -> None:
        """Use the zeroed flags of each rank; `addresses[rank]` is where that rank's flags are mapped here."""
        self.addresses, self.rank = addresses, rank
        self.sent: Counter[tuple[int, int]] = Counter()
        self.awaited: Counter[tuple[int, int]] = Counter()

    def send(self, channel: int, peer: int) -> None:
        """Signal a peer after all earlier work of the current stream."""
        self.sent[channel, peer] += 1
        address = self._flag(self.addresses[peer], channel, self.rank)
        self._call("cuStreamWriteValue32_v2", address, self.sent[channel, peer], WITH_BARRIER)

    def wait(self, channel: int, peer: int) -> None:
        """Hold back later work of the current stream until the peer's next signal."""
        self.awaited[channel, peer] += 1
        address = self._flag(self.addresses[self.rank], channel, peer)
        self._call("cuStreamWaitValue32_v2", address, self.awaited[channel, peer], GREATER_OR_EQUAL)

    def _flag(self, begin: int, channel: int, sender: int) -> int:
        """Return the address of the flag for a channel and a sender, among one rank's flags."""
        return begin + 4 * (channel * len(self.addresses) + sender)

    def _call(self, name: str, address: int, value: int, flags: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("signals=stream cannot be captured in a CUDA graph: graph=false or signals=kernel")
        words = ctypes.c_uint64(address), ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.c_uint(flags)
        call_driver(name, current_stream(), *words)


class KernelSignals:
    """Signals by torch's put_signal and wait_signal, which are kernels of one block.

    They can be captured in a CUDA graph, but wait for a free SM. A send completes only after the receiver has waited
    for the last signal on the same channel, because that wait resets the flag.
    """

    def __init__(self, handle: Any) -> None:
        """Use the signal pad of `handle`, a symmetric-memory handle that serves no other purpose."""
        self.handle = handle

    def send(self, channel: int, peer: int) -> None:
        """Signal a peer as `StreamSignals.send` does."""
        self.handle.put_signal(peer, channel)

    def wait(self, channel: int, peer: int) -> None:
        """Wait for a peer as `StreamSignals.wait` does."""
        self.handle.wait_signal(peer, channel)
