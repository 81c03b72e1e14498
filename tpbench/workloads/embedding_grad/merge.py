"""Received rows into the owner's slice, times 1/W: by index_add_, or by the Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad


class MisplacedRow(RuntimeError):
    """A rank was sent rows that it does not own."""


@dataclass(frozen=True)
class Received:
    """What came from the other ranks."""

    rows: Tensor
    """Their numbers in the whole table, int32 or int64."""
    values: Tensor
    """(len(rows), width) in the gradient's dtype."""
    segments: list[tuple[int, int]]
    """For each rank, the first of its rows for this one and how many they are; each rank's rows are distinct."""


class Merge(Protocol):
    """A way to merge."""

    def __call__(self, own: Tensor, own_rows: Tensor, received: Received) -> None:
        """`own` becomes the mean, in its place. `own_rows`: the numbers of those that this rank touched itself."""

    def verify(self) -> None:
        """Raise MisplacedRow if a row came that is not this rank's."""


def merge_for(problem: EmbeddingGrad, inputs: Inputs) -> Merge:
    """The one that the problem names."""
    return TritonMerge(inputs) if problem.merge == "triton" else IndexAddMerge(inputs)


class IndexAddMerge:
    """torch's: adds in the gradient's dtype, on a GPU in no fixed order, then scales the slice."""

    def __init__(self, inputs: Inputs) -> None:
        self.first, self.scale = inputs.owners.first(inputs.rank), 1.0 / inputs.owners.world_size

    def __call__(self, own: Tensor, own_rows: Tensor, received: Received) -> None:
        for start, count in joined(received.segments):
            rows = received.rows[start : start + count] - self.first
            own.index_add_(0, rows, received.values[start : start + count])
        own.mul_(self.scale)

    def verify(self) -> None:
        """index_add_ itself raises."""


class TritonMerge:
    """`merge_kernel.merge_rows`: fp32 sums in the order of ranks, one rounding; touched rows only."""

    def __init__(self, inputs: Inputs) -> None:
        from tpbench.workloads.embedding_grad.merge_kernel import merge_rows

        self.merge_rows = merge_rows
        self.rank, self.first = inputs.rank, inputs.owners.first(inputs.rank)
        ranks = inputs.owners.world_size
        self.scale = 1.0 / ranks
        self.table = torch.empty(ranks, inputs.owners.rows_each, dtype=torch.int32, device=inputs.device)
        self.misplaced = torch.zeros(1, dtype=torch.int32, device=inputs.device)

    def __call__(self, own: Tensor, own_rows: Tensor, received: Received) -> None:
        self.merge_rows(
            own, own_rows, received.values, received.rows, received.segments,
            rank=self.rank, first_row=self.first, scale=self.scale, table=self.table, misplaced=self.misplaced,
        )  # fmt: skip

    def verify(self) -> None:
        if misplaced := int(self.misplaced):
            raise MisplacedRow(f"rank {self.rank} was sent {misplaced} rows that it does not own")


def joined(segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Segments that follow each other as one; none that is empty."""
    found: list[tuple[int, int]] = []
    for start, count in segments:
        if count and found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + count)
        elif count:
            found.append((start, count))
    return found
