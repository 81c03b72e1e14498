"""Received rows into the owner's slice, times 1/W: by index_add_, or by the Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad


class MisplacedRow(RuntimeError):
    """A rank was sent rows that it does not own."""


Segments = Sequence[tuple[int, int]]
"""For each rank, the first of its rows among those received and how many they are; each rank's rows are distinct."""


class Merge(Protocol):
    """A way to merge, in two steps: the first needs no values."""

    def place(self, own_rows: Tensor, rows: Tensor, segments: Segments) -> None:
        """Learn the numbers in the whole table, int32 or int64, of the rows that this rank touched itself, and of those
        that the other ranks will send."""

    def __call__(self, own: Tensor, values: Tensor) -> None:
        """`own` becomes the mean, in its place. `values`: (len(rows), width) in its dtype, what was received."""

    def verify(self) -> None:
        """Raise MisplacedRow if a row came that is not this rank's."""

    def release(self) -> None:
        """Let go of the row numbers."""


def merge_for(problem: EmbeddingGrad, inputs: Inputs) -> Merge:
    """The one that the problem names."""
    return TritonMerge(inputs) if problem.merge == "triton" else IndexAddMerge(inputs)


class IndexAddMerge:
    """torch's: adds in the gradient's dtype, on a GPU in no fixed order, then scales the slice."""

    def __init__(self, inputs: Inputs) -> None:
        self.first, self.scale = inputs.owners.first(inputs.rank), 1.0 / inputs.owners.world_size

        self.placed: list[tuple[Tensor, int]] = []

    def place(self, own_rows: Tensor, rows: Tensor, segments: Segments) -> None:
        self.placed = [(rows[start : start + count] - self.first, start) for start, count in joined(segments)]

    def __call__(self, own: Tensor, values: Tensor) -> None:
        for rows, start in self.placed:
            own.index_add_(0, rows, values[start : start + len(rows)])
        own.mul_(self.scale)

    def verify(self) -> None:
        """index_add_ itself raises."""

    def release(self) -> None:
        self.placed = []


class TritonMerge:
    """`merge_kernel.merge_rows`: fp32 sums in the order of ranks, one rounding; touched rows only."""

    def __init__(self, inputs: Inputs) -> None:
        from tpbench.workloads.embedding_grad import merge_kernel

        self.kernel = merge_kernel
        self.rank, self.first = inputs.rank, inputs.owners.first(inputs.rank)
        ranks = inputs.owners.world_size
        self.scale = 1.0 / ranks
        self.table = torch.empty(ranks, inputs.owners.rows_each, dtype=torch.int32, device=inputs.device)
        self.misplaced = torch.zeros(1, dtype=torch.int32, device=inputs.device)

    def place(self, own_rows: Tensor, rows: Tensor, segments: Segments) -> None:
        self.kernel.place_rows(
            own_rows, rows, segments, rank=self.rank, first_row=self.first, table=self.table, misplaced=self.misplaced
        )

    def __call__(self, own: Tensor, values: Tensor) -> None:
        self.kernel.merge_rows(own, values, self.table, rank=self.rank, scale=self.scale)

    def verify(self) -> None:
        if misplaced := int(self.misplaced):
            raise MisplacedRow(f"rank {self.rank} was sent {misplaced} rows that it does not own")

    def release(self) -> None:
        """The table stays."""


def joined(segments: Segments) -> list[tuple[int, int]]:
    """Segments that follow each other as one; none that is empty."""
    found: list[tuple[int, int]] = []
    for start, count in segments:
        if count and found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + count)
        elif count:
            found.append((start, count))
    return found
