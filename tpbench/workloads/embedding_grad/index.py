"""Which rows a rank touched, sorted and cut at the owners' bounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.owners import Owners
from tpbench.workloads.embedding_grad.pinned import PinnedRing, cuda_copy


@dataclass
class Found:
    """A rank's distinct touched rows."""

    counts: list[int]
    """How many of them each rank owns."""
    move: Callable[[], Tensor]
    """Brings their numbers to the device, which costs a copy that a dense exchange does not need."""

    @cached_property
    def rows(self) -> Tensor:
        """(touched,) int32 on the device: by owner, each owner's ascending, this rank's own behind all others'."""
        return self.move()


class Index(Protocol):
    """A way to find them."""

    def find(self) -> Found | None:
        """The rows of this step, or None where they are not known."""


class TouchedMask:
    """Rows touched since the last `take`, over accumulated steps. On the CPU."""

    def __init__(self, table_rows: int) -> None:
        self.mask = np.zeros(table_rows, dtype=np.bool_)

    def add(self, rows: NDArray[np.int32]) -> None:
        """Rows of one step's tokens, in any order, as often as they come."""
        if len(rows) and rows.min() < 0:  # from above numpy guards itself, from below it counts from the end
            raise IndexError(f"row {rows.min()} is not in the table")
        # numpy indexes by its own kind of number at once, by others through small buffers.
        self.mask[rows.astype(np.intp)] = True

    def take(self) -> NDArray[np.intp]:
        """All of them, distinct and sorted; begins anew."""
        rows = np.flatnonzero(self.mask)
        self.mask.fill(False)
        return rows


class CpuIndex:
    """Rows known on the CPU, as hashed bigrams of the batch are: found without the GPU, copied to it asynchronously."""

    def __init__(self, inputs: Inputs, *, pinned: bool) -> None:
        self.inputs, self.mask = inputs, TouchedMask(inputs.problem.table_rows)
        self.steps = [step.numpy() for step in inputs.steps]
        self.bounds = np.array(inputs.owners.bounds)
        capacity = min(inputs.problem.table_rows, inputs.steps.numel())
        on_gpu = inputs.device.type == "cuda"
        self.ring = PinnedRing(capacity, cuda_copy(inputs.device), pinned=True) if on_gpu and pinned else None

    def find(self) -> Found:
        for step in self.steps:
            self.mask.add(step)
        rows = self.mask.take()
        cuts = np.searchsorted(rows, self.bounds)
        parts = own_last(rows, cuts, self.inputs.rank)
        ring, device = self.ring, self.inputs.device
        # From pageable memory the host waits for the copy.
        return Found(np.diff(cuts).tolist(), lambda: int32(parts).to(device) if ring is None else ring.send(parts))


def own_last(rows: NDArray[np.intp], cuts: NDArray[np.intp], rank: int) -> list[NDArray[np.intp]]:
    """Sorted rows in three parts: those of owners before this rank, of owners behind it, and its own."""
    start, stop = cuts[rank], cuts[rank + 1]
    return [rows[:start], rows[stop:], rows[start:stop]]


def int32(parts: list[NDArray[np.intp]]) -> Tensor:
    """Row numbers, one part after the other, as they are sent."""
    return torch.from_numpy(np.concatenate(parts, dtype=np.int32, casting="same_kind"))


class DeviceIndex:
    """Rows known on the device alone: torch.unique finds them, and the host waits for their number and their counts."""

    def __init__(self, inputs: Inputs) -> None:
        self.rank, self.owners = inputs.rank, inputs.owners
        self.tokens = inputs.steps.to(inputs.device)
        self.bounds = torch.tensor(self.owners.bounds, dtype=torch.int32, device=inputs.device)

    def find(self) -> Found:
        rows = torch.unique(self.tokens)
        cuts = torch.searchsorted(rows, self.bounds).tolist()
        start, stop = cuts[self.rank], cuts[self.rank + 1]
        counts = [after - before for before, after in itertools.pairwise(cuts)]
        return Found(counts, lambda: torch.cat([rows[:start], rows[stop:], rows[start:stop]]))


class EvenlySpread:
    """So many rows, the same distance apart, copied to the device each time anew as those of a step are: for
    calibration."""

    def __init__(self, owners: Owners, rank: int, device: torch.device, rows: int) -> None:
        every = np.arange(rows, dtype=np.intp) * owners.table_rows // rows
        cuts = np.searchsorted(every, np.array(owners.bounds))
        self.counts = np.diff(cuts).tolist()
        numbers = int32(own_last(every, cuts, rank))
        self.numbers = numbers.pin_memory() if device.type == "cuda" else numbers
        self.device = device

    def find(self) -> Found:
        return Found(self.counts, lambda: self.numbers.to(self.device, non_blocking=True, copy=True))
