"""The linears of a problem: their sizes, and the part of each weight that a rank holds. Without torch at import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ShardedLinear:
    """Sizes of a linear y = x W^T with W (sum(out_features), in_features), sharded over ranks."""

    name: str
    kind: Literal["column", "row"]
    """column: each rank holds a share of each part's rows of W. row: each rank holds a share of W's columns."""
    in_features: int
    out_features: tuple[int, ...]
    """Sizes of the parts that share the input, such as q, k and v. Each part is sharded by itself."""

    def rows(self, rank: int, size: int) -> list[range]:
        """Return the rows of W that a rank holds, in the order in which it holds them."""
        if self.kind == "row":
            return [range(sum(self.out_features))]
        return equal_shares(self.out_features, rank, size)

    def columns(self, rank: int, size: int) -> range:
        """Return the columns of W that a rank holds."""
        return equal_shares((self.in_features,), rank, size)[0] if self.kind == "row" else range(self.in_features)

    def local_shape(self, size: int) -> tuple[int, int]:
        """Return the (rows, columns) of one rank's part of W."""
        return sum(map(len, self.rows(0, size))), len(self.columns(0, size))

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Return a contiguous copy of a rank's part of the full W."""
        import torch

        columns = self.columns(rank, size)
        return torch.cat([full[rows.start : rows.stop, columns.start : columns.stop] for rows in self.rows(rank, size)])


def equal_shares(sizes: Sequence[int], rank: int, size: int) -> list[range]:
    """Return the rank-th of `size` equal shares of each part, for parts of these sizes that follow each other.

    Raise ValueError if a part is not divisible by `size`.
    """
    shares, start = [], 0
    for features in sizes:
        if features % size:
            raise ValueError(f"{features} features cannot be shared equally by {size} ranks")
        shares.append(range(start + rank * features // size, start + (rank + 1) * features // size))
        start += features
    return shares
