"""Pinned memory through which a step's numbers go to the GPU while the host goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Event(Protocol):
    """What a copy's end is known by: torch.cuda.Event has this."""

    def synchronize(self) -> None:
        """Wait for it."""


Copy = Callable[[Tensor], tuple[Tensor, Event]]
"""Starts a copy to the device: the tensor there, and the event of the copy's end."""


class PinnedRing:
    """A few buffers in turn. One is written again only when the copy out of it has ended, so that numbers on their way
    are never overwritten; with two, the host waits only where it is two steps ahead of the device."""

    def __init__(self, capacity: int, copy: Copy, *, pinned: bool, slots: int = 2) -> None:
        self.buffers = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(slots)]
        self.ends: list[Event | None] = [None] * slots
        self.copy = copy
        self.turn = 0

    def send(self, parts: Sequence[NDArray[np.integer[Any]]]) -> Tensor:
        """`parts`, one after the other, as an int32 tensor on the device."""
        slot = self.turn = (self.turn + 1) % len(self.buffers)
        end = self.ends[slot]
        if end is not None:
            end.synchronize()
        size = sum(map(len, parts))
        filled = self.buffers[slot][:size]
        np.concatenate(parts, out=filled.numpy(), casting="same_kind")
        moved, self.ends[slot] = self.copy(filled)
        return moved


def cuda_copy(device: torch.device) -> Copy:
    """Copies on the current stream."""

    def copy(filled: Tensor) -> tuple[Tensor, Event]:
        moved = filled.to(device, non_blocking=True)
        end = torch.cuda.Event()
        end.record()
        return moved, end

    return copy
