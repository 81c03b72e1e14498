"""Partition of the table's rows over the ranks that own them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowPartition:
    """Consecutive rows for each rank, the same number for all. Padding at the table's end makes the shares equal."""

    table_rows: int
    world_size: int

    @property
    def rows_per_rank(self) -> int:
        """Rows of a rank, padding included."""
        return -(-self.table_rows // self.world_size)

    @property
    def padded_rows(self) -> int:
        """Rows of the padded table."""
        return self.rows_per_rank * self.world_size

    def first_row(self, rank: int) -> int:
        """Return the first row of a rank."""
        return rank * self.rows_per_rank

    def unpadded_rows(self, rank: int) -> int:
        """Return how many rows of a rank belong to the table: fewer, or none, on the last ranks."""
        return max(0, min(self.rows_per_rank, self.table_rows - self.first_row(rank)))

    @property
    def bounds(self) -> list[int]:
        """First row of each rank, then the end of the last rank's rows: `world_size + 1` numbers."""
        return [self.first_row(rank) for rank in range(self.world_size + 1)]
