"""Search for the rows that a rank's tokens touched, sorted and split by the rank that owns them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.row_operations.pinned_ring import PinnedRing, cuda_copy
from tpbench.workloads.embedding_grad.tokens.row_partition import RowPartition


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


class RowFinder(Protocol):
    """Search for the touched rows of each step."""

    def find(self) -> TouchedRows | None:
        """Return the rows of this step, or None if they are not known."""


class TouchedMask:
    """Mask, on the CPU, of the rows touched since the last `take`, over accumulated steps."""

    def __init__(self, table_rows: int) -> None:
        self.mask = np.zeros(table_rows, dtype=np.bool_)

    def add(self, rows: NDArray[np.int32]) -> None:
        """Mark the rows of one step's tokens, which may be in any order and repeat. Raise IndexError outside."""
        if len(rows) and rows.min() < 0:  # numpy checks the upper bound, but counts negative numbers from the end
            raise IndexError(f"row {rows.min()} is not in the table")
        # numpy indexes with its own integer type directly, with others through small buffers.
        self.mask[rows.astype(np.intp)] = True

    def take(self) -> NDArray[np.intp]:
        """Return the marked rows, distinct and sorted, and clear the mask."""
        rows = np.flatnonzero(self.mask)
        self.mask.fill(False)
        return rows


class CpuRowFinder:
    """Search on the CPU, without the GPU, as for hashed bigrams of the batch. The GPU gets an asynchronous copy."""

    def __init__(self, inputs: EmbeddingGradInputs, *, pinned: bool) -> None:
        self.inputs, self.mask = inputs, TouchedMask(inputs.problem.table_rows)
        self.steps = [step.numpy() for step in inputs.own_tokens]
        self.bounds = np.array(inputs.partition.bounds)
        capacity = min(inputs.problem.table_rows, inputs.own_tokens.numel())
        on_gpu = inputs.device.type == "cuda"
        self.ring = PinnedRing(capacity, cuda_copy(inputs.device), pinned=True) if on_gpu and pinned else None

    def find(self) -> TouchedRows:
        for step in self.steps:
            self.mask.add(step)
        rows = self.mask.take()
        cuts = np.searchsorted(rows, self.bounds)
        parts = own_last(rows, cuts, self.inputs.rank)
        ring, device = self.ring, self.inputs.device
        # The host waits for a copy from pageable memory.
        upload = lambda: to_int32(parts).to(device) if ring is None else ring.upload(parts)  # noqa: E731
        return TouchedRows(np.diff(cuts).tolist(), upload)


def own_last(rows: NDArray[np.intp], cuts: NDArray[np.intp], rank: int) -> list[NDArray[np.intp]]:
    """Split sorted rows into those of owners before this rank, those of owners after it, and this rank's own."""
    start, stop = cuts[rank], cuts[rank + 1]
    return [rows[:start], rows[stop:], rows[start:stop]]


def to_int32(parts: list[NDArray[np.intp]]) -> Tensor:
    """Concatenate row numbers into an int32 tensor."""
    return torch.from_numpy(np.concatenate(parts, dtype=np.int32, casting="same_kind"))


class EvenlySpacedRows:
    """A given number of evenly spaced rows, for calibration. Each `find` copies them to the device, as a step does."""

    def __init__(self, partition: RowPartition, rank: int, device: torch.device, rows: int) -> None:
        spaced = np.arange(rows, dtype=np.intp) * partition.table_rows // rows
        cuts = np.searchsorted(spaced, np.array(partition.bounds))
        self.counts = np.diff(cuts).tolist()
        numbers = to_int32(own_last(spaced, cuts, rank))
        self.numbers = numbers.pin_memory() if device.type == "cuda" else numbers
        self.device = device

    def find(self) -> TouchedRows:
        return TouchedRows(self.counts, lambda: self.numbers.to(self.device, non_blocking=True, copy=True))
