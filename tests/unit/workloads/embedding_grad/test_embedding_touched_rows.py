"""Mask of touched rows, and the ring of pinned buffers through which row numbers go to the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tpbench.workloads.embedding_grad.row_operations.search import PinnedRing, TouchedMask


@pytest.mark.parametrize("row", [-1, 7])
def test_rows_outside_the_table_are_an_error(row: int) -> None:
    with pytest.raises(IndexError):
        TouchedMask(7).add(np.array([0, row], dtype=np.int32))


def test_taking_the_mask_clears_it() -> None:
    mask = TouchedMask(9)
    mask.add(np.array([5, 1, 5], dtype=np.int32))
    mask.add(np.array([8, 1], dtype=np.int32))
    assert mask.take().tolist() == [1, 5, 8]
    assert mask.take().tolist() == []


class LateCopies:
    """Device that copies only when the host waits, like a device that is far behind the host."""

    def __init__(self) -> None:
        self.pending: list[Any] = []
        self.waits = 0

    def __call__(self, filled: torch.Tensor) -> tuple[torch.Tensor, Any]:
        uploaded = torch.full_like(filled, -1)
        self.pending.append((filled, uploaded))
        return uploaded, self._Event(self, len(self.pending))

    class _Event:
        def __init__(self, device: LateCopies, count: int) -> None:
            self.device, self.count = device, count

        def synchronize(self) -> None:
            """Finish all copies up to this event."""
            self.device.waits += 1
            for filled, uploaded in self.device.pending[: self.count]:
                if (uploaded == -1).all():
                    uploaded.copy_(filled)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_pinned_buffer_is_not_written_before_its_copy_ended(slots: int) -> None:
    device = LateCopies()
    ring = PinnedRing(4, device, pinned=False, slots=slots)
    uploaded = [
        ring.upload([np.array([step, step + 1], dtype=np.int32), np.array([7], dtype=np.int32)]) for step in range(6)
    ]
    assert device.waits == 6 - slots  # and no more waits than necessary
    ring.copy_ends[ring.slot].synchronize()
    assert [numbers.tolist() for numbers in uploaded] == [[step, step + 1, 7] for step in range(6)]
