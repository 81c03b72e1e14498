"""The linears of a problem: their sizes, and which part of each a rank holds. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ShardedLinear:
    """A linear y = x W^T with W (sum(out_features), in_features), sharded over ranks."""

    name: str
    kind: Literal["column", "row"]
    """column: each rank has a share of each part's rows of W; row: a share of W's columns."""
    in_features: int
    out_features: tuple[int, ...]
    """Of the parts that share the input, such as q, k and v: each is sharded by itself."""

    def rows(self, rank: int, size: int) -> list[range]:
        """The rows of W that a rank holds, in the order in which it holds them."""
        if self.kind == "row":
            return [range(sum(self.out_features))]
        return shares(self.out_features, rank, size)

    def columns(self, rank: int, size: int) -> range:
        """The columns of W that a rank holds."""
        return shares((self.in_features,), rank, size)[0] if self.kind == "row" else range(self.in_features)

    def local_shape(self, size: int) -> tuple[int, int]:
        """(rows, columns) of one rank's part of W."""
        return sum(map(len, self.rows(0, size))), len(self.columns(0, size))

    def local(self, full: Tensor, rank: int, size: int) -> Tensor:
        """A rank's part of the full W, contiguous and no view of it."""
        import torch

        columns = self.columns(rank, size)
        kept = [full[rows.start : rows.stop, columns.start : columns.stop] for rows in self.rows(rank, size)]
        return torch.cat(kept)

    def whole(self, shards: Sequence[Tensor]) -> Tensor:
        """The full W from every rank's part, in the order of ranks."""
        import torch

        if self.kind == "row":
            return torch.cat(list(shards), dim=1)
        parts = [shard.split([each // len(shards) for each in self.out_features]) for shard in shards]
        return torch.cat([torch.cat(part) for part in zip(*parts, strict=True)])


def shares(sizes: Sequence[int], rank: int, size: int) -> list[range]:
    """Of parts that follow each other, the rank-th of `size` equal shares of each. ValueError where they are not."""
    found, start = [], 0
    for each in sizes:
        if each % size:
            raise ValueError(f"{each} features cannot be shared equally by {size} ranks")
        found.append(range(start + rank * each // size, start + (rank + 1) * each // size))
        start += each
    return found
