"""The rows of a linear loss in chunks: how many rows a chunk has, and which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

AUTO_GIB = 0.5
"""Workspace for workspace_gib="auto": 4096 rows of a vocabulary of 131,072 over two ranks, in bf16. With fewer rows the
weight's gradient, which is read and written once per chunk, takes a larger share of its product."""
AUTO_ROWS = 1024
"""Fewest rows of a chunk for workspace_gib="auto"."""
_MULTIPLE = 128
"""Rows of a chunk are a multiple of this where memory allows it, as are the tiles of matrix products."""


@dataclass(frozen=True)
class Chunks:
    """Equal chunks of rows, the last one perhaps smaller. Rows that ranks share are taken from all ranks' parts."""

    rows: int
    """Rows of the problem."""
    most: int
    """Rows of a chunk."""
    shards: int
    """Ranks that hold rows / shards of the hidden states each. 1: each rank holds all rows."""

    def __len__(self) -> int:
        return -(-self.rows // self.most) if self.rows else 0

    def local(self, index: int) -> slice:
        """Return the rows of a chunk, as rows of one rank's part."""
        step, part = self.most // self.shards, self.rows // self.shards
        return slice(index * step, min((index + 1) * step, part))

    def take(self, values: Tensor, index: int) -> Tensor:
        """Return a chunk of a tensor of all rows: a view if ranks do not share rows, else contiguous, in rank order."""
        if self.shards == 1:
            return values[self.local(index)]
        return self._by_rank(values)[:, self.local(index)].flatten(0, 1).contiguous()

    def put(self, values: Tensor, chunk: Tensor, index: int) -> None:
        """Store a chunk that `take` may have copied."""
        if self.shards > 1:
            self._by_rank(values)[:, self.local(index)] = chunk.view(self.shards, -1, *chunk.shape[1:])

    def in_order(self, values: Tensor) -> Tensor:
        """Return the rows of all chunks, one chunk behind the other, contiguous."""
        if self.shards == 1:
            return values.contiguous()
        return torch.cat([self.take(values, index) for index in range(len(self))])

    def put_all(self, values: Tensor, in_order: Tensor) -> None:
        """Store the rows of all chunks, one chunk behind the other in `in_order`, if ranks share rows."""
        first = 0
        for index in range(len(self)):
            rows = self.local(index)
            last = first + int(rows.stop - rows.start) * self.shards
            self.put(values, in_order[first:last], index)
            first = last

    def _by_rank(self, values: Tensor) -> Tensor:
        return values.view(self.shards, self.rows // self.shards, *values.shape[1:])


def bytes_of_row(columns: int, dtypes: list[torch.dtype]) -> int:
    """Return the workspace of one row: its logits, which their gradient overwrites, and its target logits."""
    return sum(columns * dtype.itemsize for dtype in dtypes)


def chunks_of(rows: int, shards: int, row_bytes: int, workspace_gib: float | Literal["auto"]) -> Chunks:
    """Return as few chunks as the workspace allows, of about equal size. The least chunk is a row of each shard.

    row_bytes: must be the same on all ranks, since chunks are.
    """
    gib = AUTO_GIB if workspace_gib == "auto" else workspace_gib
    allowed = max(int(gib * 2**30 / max(1, row_bytes)), AUTO_ROWS if workspace_gib == "auto" else 1)
    if rows <= allowed:
        return Chunks(rows, max(rows, shards), shards)
    number = -(-rows // allowed)
    most = -(-rows // number)
    unit = shards * (_MULTIPLE if most > _MULTIPLE * shards else 1)
    rounded = -(-most // unit) * unit
    if rounded > allowed:
        rounded = max(allowed // unit, 1) * unit
    return Chunks(rows, rounded, shards)


def workspace_gib_of(value: Any) -> None:
    """Raise unless `value` is "auto" or a positive number."""
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
        raise ValueError(f"workspace_gib must be 'auto' or a positive number, got {value!r}")
