"""Flags between ranks, in the order of streams: without them no rank knows that a peer's copy has arrived.

A peer's waits on a channel are for the signals in the order in which they were sent. Both act on the current stream and
return at once.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any, Protocol

import torch

from tpbench.comm import cuda_driver

GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: cyclic comparison of 32 bits
WITH_BARRIER = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what the stream wrote before is visible first


class Signals(Protocol):
    """What orders copies over ranks."""

    def send(self, channel: int, peer: int) -> None:
        """After all that this stream did before, tell a peer."""

    def wait(self, channel: int, peer: int) -> None:
        """Nothing later on this stream begins before the peer's next signal."""


class StreamSignals:
    """Memory operations of the stream itself (cuStreamWriteValue32, cuStreamWaitValue32): they need no SM, so a product
    that fills the GPU delays none. Flags count up; a captured graph would wait for numbers that have passed, so that
    capturing is refused."""

    def __init__(self, addresses: list[int], rank: int) -> None:
        """`addresses`: where each rank's flags begin, zeros, as mapped here."""
        self.addresses, self.rank = addresses, rank
        self.sent: Counter[tuple[int, int]] = Counter()
        self.awaited: Counter[tuple[int, int]] = Counter()

    def send(self, channel: int, peer: int) -> None:
        self.sent[channel, peer] += 1
        address = self._flag(self.addresses[peer], channel, self.rank)
        self._call("cuStreamWriteValue32_v2", address, self.sent[channel, peer], WITH_BARRIER)

    def wait(self, channel: int, peer: int) -> None:
        self.awaited[channel, peer] += 1
        address = self._flag(self.addresses[self.rank], channel, peer)
        self._call("cuStreamWaitValue32_v2", address, self.awaited[channel, peer], GREATER_OR_EQUAL)

    def _flag(self, begin: int, channel: int, sender: int) -> int:
        """A rank's flag for a channel and a sender."""
        return begin + 4 * (channel * len(self.addresses) + sender)

    def _call(self, name: str, address: int, value: int, flags: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("signals=stream cannot be captured in a CUDA graph: graph=false or signals=kernel")
        words = ctypes.c_uint64(address), ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.c_uint(flags)
        cuda_driver.call(name, cuda_driver.current_stream(), *words)


class KernelSignals:
    """torch's put_signal and wait_signal: kernels of one block. A signal is sent once the last one on its channel has
    been waited for, which resets the flag. They can be captured in a CUDA graph, and wait for a free SM."""

    def __init__(self, handle: Any) -> None:
        """`handle`: of memory that serves nothing else, whose signal pad has the flags."""
        self.handle = handle

    def send(self, channel: int, peer: int) -> None:
        self.handle.put_signal(peer, channel)

    def wait(self, channel: int, peer: int) -> None:
        self.handle.wait_signal(peer, channel)
