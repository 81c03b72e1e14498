"""Merge of received rows into the owner's slice, times 1/W, by index_add_ or by the Triton kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad


class MisplacedRow(RuntimeError):
    """Error: a rank was sent rows that it does not own."""


Segments = Sequence[tuple[int, int]]
"""For each rank the first of its rows among those received, and their number. Rows of one rank are distinct."""


class Merge(ABC):
    """A merge in two steps, of which the first needs no values."""

    @abstractmethod
    def place(self, own_rows: Tensor, rows: Tensor, segments: Segments) -> None:
        """Prepare for the rows that the other ranks will send.

        own_rows: (own,), the rows of this rank's slice that it touched itself. rows: (received,), the rows that the
        others send. Both are int32 or int64 numbers in the whole table.
        """

    @abstractmethod
    def __call__(self, own: Tensor, values: Tensor) -> None:
        """Replace `own`, (rows_per_rank, width), by the mean. `values`: the (received, width) rows, of its dtype."""

    def verify(self) -> None:  # noqa: B027  # index_add_ itself raises
        """Raise MisplacedRow if a received row is not this rank's."""

    def release(self) -> None:  # noqa: B027  # the Triton merge reuses its table
        """Free the row numbers."""


def merge_for(problem: EmbeddingGrad, inputs: EmbeddingGradInputs) -> Merge:
    """Return the merge that the problem names."""
    return TritonMerge(inputs) if problem.merge == "triton" else IndexAddMerge(inputs)


class IndexAddMerge(Merge):
    """Merge by torch's index_add_: adds in the gradient's dtype, on a GPU in no fixed order, then scales the slice."""

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        self.first_row = inputs.partition.first_row(inputs.rank)
        self.scale = 1.0 / inputs.partition.world_size
        self.placed: list[tuple[Tensor, int]] = []
        """Rows of this slice, and the position of their first value among those received."""

    def place(self, own_rows: Tensor, rows: Tensor, segments: Segments) -> None:
        self.placed = [
            (rows[start : start + count] - self.first_row, start) for start, count in join_adjacent(segments)
        ]

    def __call__(self, own: Tensor, values: Tensor) -> None:
        for rows, start in self.placed:
            own.index_add_(0, rows, values[start : start + len(rows)])
        own.mul_(self.scale)

    def release(self) -> None:
        self.placed = []


class TritonMerge(Merge):
    """Merge by `merge_kernel.merge_rows`: fp32 sums of touched rows, in the order of ranks, with one rounding."""

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        from tpbench.workloads.embedding_grad.row_operations import merge_kernel

        self.kernel = merge_kernel
        partition, self.rank = inputs.partition, inputs.rank
        self.first_row, self.scale = partition.first_row(self.rank), 1.0 / partition.world_size
        shape = (partition.world_size, partition.rows_per_rank)
        self.table = torch.empty(shape, dtype=torch.int32, device=inputs.device)
        self.misplaced = torch.zeros(1, dtype=torch.int32, device=inputs.device)

    def place(self, own_rows: Tensor, rows: Tensor, segments: Segments) -> None:
        self.kernel.place_rows(
            own_rows,
            rows,
            segments,
            rank=self.rank,
            first_row=self.first_row,
            table=self.table,
            misplaced=self.misplaced,
        )

    def __call__(self, own: Tensor, values: Tensor) -> None:
        self.kernel.merge_rows(own, values, self.table, rank=self.rank, scale=self.scale)

    def verify(self) -> None:
        if misplaced := int(self.misplaced):
            raise MisplacedRow(f"rank {self.rank} was sent {misplaced} rows that it does not own")


def join_adjacent(segments: Segments) -> list[tuple[int, int]]:
    """Join segments that follow each other and drop empty ones."""
    joined: list[tuple[int, int]] = []
    for start, count in segments:
        if count and joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        elif count:
            joined.append((start, count))
    return joined
