"""Pinned buffers through which a step's row numbers go to the GPU while the host continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
